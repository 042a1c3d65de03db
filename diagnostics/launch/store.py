"""Results of the whole matrix, kept as they come, so that a run that was cut short can go on.

JSON lines in `$XDG_CACHE_HOME/dflash-diag` (`~/.cache/dflash-diag`), in a file named after what the
results depend on: the versions of Python, bash, tmux and the kernel, and the code of the trials.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from diagnostics.launch.trial import Cell, Result

# A change in one of these makes results old.
CODE = ("console", "deaths", "family", "private_tmux", "scene", "shapes", "trial", "victim")
TOOLS = (["bash", "--version"], ["tmux", "-V"], ["script", "--version"])


class Store:
    """The file of this machine's results. Raises OSError where it cannot be written."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        folder = Path(base) / "dflash-diag"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"launch-{_key()}.jsonl"

    def load(self) -> dict[Cell, Result]:
        """What was measured before; a last line that was cut short does not count."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        return dict(_whole(lines))

    def clear(self) -> None:
        """Forget what was measured."""
        self.path.unlink(missing_ok=True)

    def add(self, cell: Cell, result: Result) -> None:
        """Keep one more; a line that an earlier run left unfinished is ended first."""
        line = json.dumps([asdict(cell), asdict(result)])
        with open(self.path, "a", encoding="utf-8", opener=_private) as file:
            file.write(f"\n{line}\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _whole(lines: list[str]) -> Iterator[tuple[Cell, Result]]:
    for line in lines:
        try:
            cell, result = json.loads(line)
        except ValueError:
            continue
        yield Cell(**cell), Result(**result)


def _key() -> str:
    """Twelve hexadecimal digits."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.release()}".encode())
    for command in TOOLS:
        if shutil.which(command[0]):
            digest.update(subprocess.run(command, capture_output=True, timeout=10).stdout)
    for name in CODE:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]
