"""What one check found, and what all checks look at."""

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from diagnostics import gpus
from diagnostics.processes import GPU, Process, Table
from diagnostics.verdict import Status

if TYPE_CHECKING:  # not at import: another distribution may own that name
    from dflash.config import TrainConfig


@dataclass(frozen=True)
class Culprit:
    """A process that should not be there, and what it does: `holds /dev/nvidia0`."""

    process: Process
    does: str
    whose: str

    def __str__(self) -> str:
        return self.with_all(self.does)

    def with_all(self, does: str) -> str:
        """The same with more that it does."""
        return f"{self.process}, {self.whose}: {does}"


@dataclass(frozen=True)
class Line:
    """One check's result: what was found, in one line and in detail, and what to do about it."""

    name: str
    status: Status
    said: str
    details: tuple[str, ...] = ()
    remedy: str = ""
    culprits: tuple[Culprit, ...] = ()

    def __str__(self) -> str:
        """On one line, without its name."""
        rest = [*self.details, *([self.remedy] if self.remedy else [])]
        return "; ".join([f"{self.status}: {self.said}", *rest])


def ok(name: str, said: str, *details: str) -> Line:
    """Looked, and nothing is wrong."""
    return Line(name, Status.OK, said, details)


def problem(name: str, said: str, *details: str, remedy: str) -> Line:
    """Something is wrong."""
    return Line(name, Status.PROBLEM, said, details, remedy)


def unknown(name: str, said: str, *details: str, remedy: str = "") -> Line:
    """It could not be looked at, or not at all of it."""
    return Line(name, Status.UNKNOWN, said, details, remedy)


@dataclass(frozen=True)
class Run:
    """The run that is to start. `pid`: of the process that its heartbeat is of, if it lives."""

    config: "TrainConfig"
    directory: Path
    pid: int | None

    def owns(self, process: Process) -> bool:
        """Whether a process belongs to a run in this very output directory."""
        if self.pid in (process.pid, process.parent):
            return True
        return any(map(self._contains, process.opened)) or self._is_named_by(process)

    def _contains(self, path: str) -> bool:
        return Path(path).is_relative_to(self.directory)

    def _is_named_by(self, process: Process) -> bool:
        """Whether its command line names the directory, or a file in it (--config OUT/run.toml)."""
        try:
            cwd = os.readlink(f"/proc/{process.pid}/cwd")
        except OSError:
            cwd = "/"
        words = (word.partition("=")[2] or word for word in process.words)
        return any(self._contains(os.path.normpath(os.path.join(cwd, word))) for word in words)


@dataclass(frozen=True)
class Seen:
    """What the checks look at; `ports` and `session` as asked for."""

    table: Table
    run: Run | None = None
    gpu: re.Pattern[str] = GPU
    ports: tuple[int, ...] = ()
    session: str | None = None
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    @cached_property
    def gpus(self) -> list[gpus.Gpu] | None:
        """What the driver says, asked once: see `gpus.ask`."""
        return gpus.ask()

    def whose(self, process: Process) -> str:
        """Of this run, of this user, or of another one."""
        if self.run is not None and self.run.owns(process):
            return "this run's"
        if process.user == os.geteuid():
            return "yours"
        try:
            return f"{pwd.getpwuid(process.user).pw_name}'s"
        except KeyError:
            return f"user {process.user}'s"

    def leftovers(
        self, name: str, none: str, found: Sequence[tuple[Process, str]], first: str = ""
    ) -> Line:
        """The line of a check for processes: those found, with what each does, or `none`.

        Args:
            first: what to do before any of them is ended.
        """
        if not found:
            blind = unknown(name, f"{none}, as far as can be seen")
            return blind if self.table.gap else ok(name, none)
        culprits = tuple(Culprit(process, does, self.whose(process)) for process, does in found)
        offered = tuple(c for c in culprits if c.process not in self.table.above)
        pids = " ".join(str(culprit.process.pid) for culprit in offered)
        end = f"If it is over: kill {pids}, or --fix, which asks for each."
        remedy = first + (end if offered else "It has started this command: end it by hand.")
        said = f"{len(found)} process(es): {' '.join(str(c.process.pid) for c in culprits)}"
        return Line(name, Status.PROBLEM, said, tuple(map(str, culprits)), remedy, offered)


def size(nbytes: float) -> str:
    """Bytes for people, in the unit that suits them."""
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= unit_bytes:
            return f"{nbytes / unit_bytes:.1f} {unit}"
    return f"{nbytes:.0f} bytes"
