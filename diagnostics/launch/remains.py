"""What a launch has left: its log, processes that have to do with it, tmux. Looked at, not changed.

Whatever cannot be read (other users' processes) is counted, so that nobody takes it for absent.
"""

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from diagnostics import processes
from diagnostics.launch import tmux_session
from diagnostics.redact import redact_command

CSH_LOG = "1"  # where csh writes `> train.log 2>&1`


@dataclass(frozen=True)
class Output:
    """Where a process writes: a descriptor of its own, as /proc shows it.

    `visible`: the file system that it lies on is among those that can be seen from here.
    """

    fd: int
    link: str
    place: tuple[int, int]
    links: int
    size: int
    regular: bool
    visible: bool

    @property
    def path(self) -> str:
        """Its name, or the last one that it had."""
        return self.link.removesuffix(processes.DELETED)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        return self.regular and self.links == 0

    @property
    def is_at_its_path(self) -> bool:
        """Whether one finds this very file under its name, from here."""
        return place_of(Path(self.path)) == self.place


@dataclass(frozen=True)
class Process:
    """One that has to do with the launch; `command` is redacted, `started_s` since the epoch."""

    pid: int
    command: str
    started_s: float
    outputs: tuple[Output, ...]
    namespace: str
    leaderless: bool
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command[:60]})"

    @property
    def since(self) -> str:
        """When it was started, for people."""
        return time.strftime("%F %T", time.localtime(self.started_s))

    def holds(self, log: Path) -> bool:
        """Whether it keeps a GPU or this log: others may only be called alike."""
        return bool(self.gpus) or any(output.path == str(log) for output in self.outputs)


@dataclass(frozen=True)
class Remains:
    """All that can be seen. `since`: when the launch was, in seconds since the epoch, if known."""

    log: Path
    session: str | None
    since: float | None
    since_was_said: bool
    processes: tuple[Process, ...]
    unreadable: int

    @cached_property
    def ours(self) -> list[Process]:
        """Those that may have been started by the launch."""
        if self.since is None:
            return list(self.processes)
        tick_s = 1 / processes.TICKS_PER_S  # a start is known to a clock tick
        return [p for p in self.processes if p.started_s >= self.since - tick_s]

    @cached_property
    def earlier(self) -> list[Process]:
        """Those that ran before it."""
        return [p for p in self.processes if p not in self.ours]

    @cached_property
    def writers(self) -> list[tuple[Process, Output]]:
        """Of ours: who writes into which file; each file once."""
        found = {
            (process.pid, output.place): (process, output)
            for process in self.ours
            for output in reversed(process.outputs)
            if output.regular
        }
        return list(found.values())

    @cached_property
    def log_is_new(self) -> bool:
        """Whether there is a log, which was written to since the launch."""
        try:
            status = self.log.stat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        return self.since is None or status.st_mtime >= self.since


def gather(log: Path, session: str | None, since: float | None, gpu: re.Pattern[str]) -> Remains:
    """Look at every process: GPU holders, and those whose output has to do with the log."""
    said = since is not None
    if not said and session is not None:
        created = tmux_session.ask(
            "display-message", "-p", "-t", f"={session}:", "#{session_created}"
        )
        since = float(created) if created and created.isdigit() else None
    table = processes.look()
    gpus = {holder.pid: holder.devices(gpu) for holder in table.holders(gpu)}
    mounts = _mounts()
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            outputs = tuple(_outputs(process.pid, mounts))
            if process.pid in gpus or any(_concerns(output, log) for output in outputs):
                found.append(_process(process, outputs, gpus.get(process.pid, ())))
        except (psutil.Error, OSError):
            continue  # it has ended, or is counted in `unreadable`
    found = [*found, *_before_tee(log, mounts, {process.pid for process in found})]
    return Remains(log, session, since, said, tuple(found), table.unreadable)


def _concerns(output: Output, log: Path) -> bool:
    if not output.regular:
        return False
    path = Path(output.path)
    by_csh = path.name == CSH_LOG and path.parent in {log.parent, Path.cwd(), Path.home()}
    return by_csh or path.name == log.name or output.place == place_of(log)


def _process(
    process: psutil.Process, outputs: tuple[Output, ...], gpus: tuple[str, ...]
) -> Process:
    words = process.cmdline() or [process.name()]
    return Process(
        process.pid,
        " ".join(redact_command([os.path.basename(words[0]), *words[1:]]).split()),
        processes.started_s(process.pid),
        outputs,
        os.readlink(f"/proc/{process.pid}/ns/mnt"),
        _is_leaderless(process, words),
        gpus,
    )


def _is_leaderless(process: psutil.Process, words: list[str]) -> bool:
    """Whether it was another's worker, and that one is gone."""
    leaders = {os.getsid(process.pid), os.getpgid(process.pid)}
    if not all(psutil.pid_exists(leader) for leader in leaders):
        return True
    parent = process.parent()
    is_worker = processes.is_worker(tuple(words), process.environ())
    return is_worker and (parent is None or "python" not in parent.name())


def _outputs(pid: int, mounts: set[str]) -> Iterator[Output]:
    """Its standard output and error. Raises OSError."""
    for fd in (1, 2):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            link, status = os.readlink(path), os.stat(path)
            info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
        except FileNotFoundError:
            continue  # closed
        regular = link.startswith("/") and not link.startswith("/dev/")
        mount = info.partition("mnt_id:")[2].split()[0]
        place = (status.st_dev, status.st_ino)
        visible = mount in mounts
        yield Output(fd, link, place, status.st_nlink, status.st_size, regular, visible)


def _before_tee(log: Path, mounts: set[str], known: set[int]) -> Iterator[Process]:
    """`tee` that was to write this log, and who writes into its pipe."""
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] == "tee" and any(Path(w).name == log.name for w in words[1:]):
            try:
                if process.pid not in known:
                    yield _process(process, tuple(_outputs(process.pid, mounts)), ())
            except (psutil.Error, OSError):
                continue


def opened_by(pid: int) -> list[str]:
    """Names of all files that a process has open."""
    try:
        return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def _mounts() -> set[str]:
    """Ids of the mounts that can be seen from here."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0] for line in lines}


def place_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of what lies there now; None if nothing does."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
