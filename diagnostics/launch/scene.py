"""Where a trial takes place: a private directory, the victim, a script and the environment."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from diagnostics.launch import family, victim
from diagnostics.launch.deaths import Buffering, Death
from diagnostics.launch.private_tmux import shim_tmux
from diagnostics.launch.shapes import PYTHON, Shape

LINES = 200
SMALL_DISK_LINES = 128
PAGE = 4096
TOOL_S = 15.0  # for tmux or mount to answer
VICTIM = Path(victim.__file__)


@dataclass(frozen=True)
class Plan:
    """What the victim reads: where to tell the truth, what to write and how, and how to die."""

    record: str
    lines: int
    output: str
    code: str


class Scene:
    """A private directory with a victim in it, and where to look for what becomes of it.

    `pid_file`: where the launch writes a process id, if not on the terminal.
    """

    pid_file: Path | None = None

    def __init__(self, folder: Path, shape: Shape, log: Path, env: Mapping[str, str]) -> None:
        self.shape = shape
        self.record = folder / "record"
        self.log = log
        self.env = env
        self._tmux = shutil.which("tmux", path=env["PATH"]) or "tmux"

    def tmux(self, *arguments: str) -> str | None:
        """What the scene's own tmux server answers; None if it refuses."""
        ended = subprocess.run(
            [self._tmux, *arguments], env=self.env, capture_output=True, text=True, timeout=TOOL_S
        )
        return ended.stdout.strip() if ended.returncode == 0 else None


class Desk(Scene):
    """The scene of a shape: its script, the victim, and the environment to run them in."""

    def __init__(self, folder: Path, shape: Shape, death: Death, buffering: Buffering) -> None:
        self.work = folder / "work"
        env = _environment(folder, dict(buffering.variables))
        super().__init__(folder, shape, self.work / shape.log, env)
        self.small = death.needs == "tmpfs"
        self.line = shape.line.replace(PYTHON, buffering.python)
        self._script = shape.script.replace(PYTHON, buffering.python)
        self._plan = Plan(str(self.record), LINES, buffering.output, death.code)
        self.work.mkdir()
        if not self.small:
            self._fill()

    def _fill(self) -> None:
        place_victim(self.work, "train.py", self._plan)
        if self._script:
            (self.work / "start.sh").write_text(f"{self._script}\n")

    @contextmanager
    def disk(self) -> Iterator[None]:
        """The small disk, while it is needed: room for what the launch needs and for 128 lines."""
        if not self.small:
            yield
            return
        family.own_mounts()
        files = VICTIM.stat().st_size // PAGE + 1 + 1 + bool(self._script)
        room = (files + SMALL_DISK_LINES * victim.WIDTH // PAGE) * PAGE
        options = ["-t", "tmpfs", "-o", f"size={room}", "none", str(self.work)]
        subprocess.run(["mount", *options], check=True, capture_output=True, timeout=TOOL_S)
        try:
            self._fill()
            yield
        finally:
            unmount = ["umount", str(self.work)]
            subprocess.run(unmount, check=True, capture_output=True, timeout=TOOL_S)


@functools.cache
def can_mount() -> bool:
    """Whether a small disk can be had. Tried in mounts that end with the trying."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    try:
        return subprocess.run(command, capture_output=True, timeout=TOOL_S).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def place_victim(folder: Path, name: str, plan: Plan) -> Path:
    """Put it there with its plan beside it."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    return Path(shutil.copy(VICTIM, folder / name))


def _environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The user's own, without what would lead out of the folder, or buffer otherwise."""
    tools, home = folder / "bin", folder / "home"
    tools.mkdir()
    home.mkdir()
    (tools / "python3").symlink_to(Path(sys.executable).resolve())
    path = f"{tools}:{os.environ.get('PATH', os.defpath)}"
    shim_tmux(folder, os.devnull)
    # A login shell's /etc/profile sets PATH anew.
    (home / ".bash_profile").write_text('PATH="$TRIAL_PATH"\n')
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TMUX", "BASH"))}
    own = {
        "PATH": path,
        "TRIAL_PATH": path,
        "HOME": str(home),
        "SHELL": shutil.which("bash") or "/bin/bash",
        "TERM": "dumb",
        "PS1": "",
        "HISTFILE": "",
    }
    return kept | own | variables
