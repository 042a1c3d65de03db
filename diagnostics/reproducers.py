"""Run the programs of repro/ as children: a hang or a crash in one is a finding, not a casualty.

They speak in lines, say their outcome on the last one as JSON, and exit 10 reproduced, 0 absent,
125 cannot tell; 1 is left to Python's own uncaught exceptions.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

DIAGNOSTICS_DIR = Path(__file__).resolve().parent


class Outcome(StrEnum):
    """What became of one run. Only `absent` means that the failure did not happen."""

    REPRODUCED = "reproduced"
    ABSENT = "absent"
    CANNOT_TELL = "cannot tell"
    CRASHED = "crashed"
    HUNG = "hung"
    MEASURED = "measured"  # a number was asked for, not a failure


EXIT_CODES = {10: Outcome.REPRODUCED, 0: Outcome.ABSENT, 125: Outcome.CANNOT_TELL}


def reproducer_dir() -> Path:
    """Where the reproducers lie: inside the installed package, or beside it in a checkout."""
    inside = DIAGNOSTICS_DIR / "repro"
    return inside if inside.is_dir() else DIAGNOSTICS_DIR.with_name("repro")


def reproducers() -> dict[str, Path]:
    """Code (`DF001`) -> program, in the order of the codes."""
    paths = sorted(reproducer_dir().glob("df[0-9][0-9][0-9]_*.py"))
    return {path.name[:5].upper(): path for path in paths}


def cures() -> list[str]:
    """The names that `--cure` takes, read from the file that has them."""
    text = (reproducer_dir() / "cures.py").read_text(encoding="utf-8")
    return re.findall(r'^    name(?:: [^=]+)? = "(.+)"$', text, re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` as subprocess has it, None if it was killed for its silence."""

    code: int | None
    stderr: str

    def how(self) -> str:
        """In words, with its last ones."""
        if self.code is None:
            return f"it said nothing for too long and was killed: {last_line(self.stderr)}"
        if self.code < 0:
            return f"it was killed by {signal.Signals(-self.code).name}: {last_line(self.stderr)}"
        return f"exit code {self.code}: {last_line(self.stderr)}"


def follow(
    program: Path,
    arguments: Sequence[str],
    on_line: Callable[[str], None],
    *,
    quiet_s: float,
    python: str = sys.executable,
    before_killing: Callable[[int], None] = lambda _pid: None,
) -> Ended:
    """Run a program and hand over each line of its output as it comes.

    Args:
        quiet_s: without a line for so many seconds, it and all that it started are killed.
        before_killing: called with its process id then, to look at what hangs.
    """
    command = [python, "-W", "ignore", str(program), *arguments]
    # A file and not a pipe: torch's warnings would fill a pipe that nobody reads meanwhile.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=_environment(python),
        )
        with child:
            code = _listen(child, on_line, quiet_s, before_killing)
        errors.seek(0)
        return Ended(code, errors.read().decode(errors="replace"))


def _environment(python: str) -> dict[str, str]:
    """One OpenMP thread; and PYTHONPATH and the like are meant for this interpreter only."""
    own = python == sys.executable
    kept = {name: value for name, value in os.environ.items() if own or name[:6] != "PYTHON"}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def _listen(
    child: subprocess.Popen[bytes],
    on_line: Callable[[str], None],
    quiet_s: float,
    before_killing: Callable[[int], None],
) -> int | None:
    """The exit code, or None after `quiet_s` of silence. Nothing of the child is left behind."""
    try:
        for line in _lines(child, quiet_s):
            on_line(line)
        return child.wait(quiet_s)
    except (TimeoutError, subprocess.TimeoutExpired):
        before_killing(child.pid)
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _lines(child: subprocess.Popen[bytes], quiet_s: float) -> Iterator[str]:
    """Raises TimeoutError if no line comes for so long."""
    assert child.stdout is not None
    rest = b""
    while select.select([child.stdout], [], [], quiet_s)[0]:
        piece = os.read(child.stdout.fileno(), 1 << 16)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    else:
        raise TimeoutError
    if rest:
        yield rest.decode(errors="replace")


def said(line: str) -> dict[str, Any]:
    """A JSON object that a child said on a line; empty if it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
