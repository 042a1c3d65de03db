"""What the kernel shows of every process here: read once, in one pass, nothing changed.

Whatever may not be read is counted, and looks that see not even this process say so: nobody may
take "not seen" for "not there". Processes of other containers are not to be seen at all.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil

from diagnostics.interpreter import program
from diagnostics.launch import onsite
from diagnostics.redact import redact_command

GPU = re.compile(r"/dev/nvidia\d+")
# They hold every GPU of a machine for its whole life, and use none.
SERVICES = {"nvidia-persistenced", "nv-hostengine", "dcgm-exporter"}
INDUCTOR = ("-m", "torch._inductor.compile_worker")
INDUCTOR_FILE = "torch/_inductor/compile_worker/__main__.py"
KERNEL_THREAD = 0x00200000  # PF_KTHREAD, in field 9 of /proc/PID/stat
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DELETED = " (deleted)"
SHOWN_COMMAND = 100
SHOWN_UNREADABLE = 3
Place = tuple[int, int]


@dataclass(frozen=True)
class Process:
    """One process, as seen at one moment.

    Attributes:
        words: its command line, with its secrets: show `command`.
        ticks: when it started, in clock ticks since boot (field 22 of /proc/PID/stat).
        threads: those that live, where the leader is a zombie; else empty.
        links: what its open descriptors are called; `maps`: what its mappings are.
        places: device and inode of what it maps.
        deleted: a file without a name that its output goes to.
        is_readable: whether `links`, `maps`, `places` and `deleted` could be read.
    """

    pid: int
    parent: int
    user: int
    words: tuple[str, ...]
    started_s: float
    ticks: int
    threads: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    places: frozenset[Place] = frozenset()
    deleted: str = ""
    is_readable: bool = True

    @property
    def command(self) -> str:
        """Its command line, redacted, on one line that is not too long."""
        text = " ".join(redact_command(self.words).split())
        return text if len(text) <= SHOWN_COMMAND else f"{text[:SHOWN_COMMAND]}..."

    @property
    def name(self) -> str:
        """The program's name."""
        return os.path.basename(self.words[0]) if self.words else ""

    @property
    def age(self) -> str:
        """How long it has run, for people."""
        return duration(time.time() - self.started_s)

    @property
    def opened(self) -> set[str]:
        """Names of all files and devices that it has open or mapped."""
        return {*self.links, *self.maps}

    def devices(self, gpu: re.Pattern[str] = GPU) -> tuple[str, ...]:
        """The GPUs that it has open."""
        return tuple(sorted(path for path in self.opened if gpu.fullmatch(path)))

    def __str__(self) -> str:
        return f"{self.pid} ({self.command}), {self.age} old"


@dataclass(frozen=True)
class Table:
    """All processes at one moment.

    Attributes:
        processes: all but this one and those that it descends from, which are `above`.
        began_s: when the look began, in seconds since the epoch.
        blind: why nothing can be concluded from what was not seen; empty if it can.
    """

    processes: tuple[Process, ...]
    began_s: float
    blind: str = ""
    above: tuple[Process, ...] = ()

    @cached_property
    def unreadable(self) -> int:
        """How many processes could not be looked into."""
        return sum(not process.is_readable for process in self.processes)

    @property
    def gap(self) -> str:
        """Why something may be there that was not seen; empty if all was."""
        if self.blind:
            return self.blind
        if not self.unreadable:
            return ""
        named = [f"{p.pid} {p.name}" for p in self.processes if not p.is_readable]
        more = ", ..." if len(named) > SHOWN_UNREADABLE else ""
        hint = "; run this as root" if os.geteuid() else ""
        shown = ", ".join(named[:SHOWN_UNREADABLE]) + more
        return f"{len(named)} process(es) cannot be looked into: {shown}{hint}"

    def holders(self, gpu: re.Pattern[str] = GPU) -> list[Process]:
        """Those that have a GPU open, services left out."""
        everybody = (*self.processes, *self.above)
        return [p for p in everybody if p.name not in SERVICES and p.devices(gpu)]


def look() -> Table:
    """Read every process now."""
    began_s, boot_s = time.time(), booted_s()
    found = [p for pid in _pids() if (p := _read(pid, boot_s)) is not None]
    me = os.getpid()
    seen = next((process for process in found if process.pid == me), None)
    own = {me, *(parent.pid for parent in psutil.Process().parents())} - {1}
    others = tuple(process for process in found if process.pid not in own)
    above = tuple(process for process in found if process.pid in own)
    return Table(others, began_s, _why_blind(seen), above)


def is_worker(words: tuple[str, ...], environment: Mapping[str, str]) -> bool:
    """Whether a process is another's worker: of multiprocessing, torchrun or Inductor."""
    told = program(words)
    return (
        "TORCHELASTIC_RUN_ID" in environment
        or "--multiprocessing-fork" in words
        or (told.how == "-c" and "from multiprocessing." in told.what)
        or (told.how == "" and told.what.endswith(INDUCTOR_FILE))
        or (told.how, told.what) == INDUCTOR
    )


def duration(seconds: float) -> str:
    """A time span in the unit that suits it."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds / size_s:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _why_blind(seen: Process | None) -> str:
    """This process is the control of every look: what is not seen of it is not seen of others."""
    if seen is None:
        return "/proc does not show even this process"
    looks = {
        "command lines": seen.words,
        "open files": seen.links,
        "mappings": seen.places,
        "threads": _threads(seen.pid),
    }
    missing = [name for name, found in looks.items() if not found]
    if missing:
        return f"/proc does not show the {' and '.join(missing)} of even this process"
    if os.geteuid() and _hides_others():
        return "/proc hides the processes of other users (hidepid): run this as root"
    return ""


def _hides_others() -> bool:
    lines = Path("/proc/mounts").read_text().splitlines()
    options = [line.split()[3] for line in lines if line.split()[1] == "/proc"]
    return bool(options) and re.search(r"hidepid=([1-9]|[a-z])", options[-1]) is not None


def booted_s() -> float:
    """When this kernel booted, since the epoch; psutil has it in whole seconds only."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def started_s(pid: int) -> float:
    """The clock tick in which a process started, since the epoch. Raises ProcessLookupError."""
    if not (fields := onsite.stat(pid)):
        raise ProcessLookupError(pid)
    return booted_s() + int(fields[19]) / TICKS_PER_S


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, boot_s: float) -> Process | None:
    """None if it is gone, a thread of the kernel's, or a zombie, which holds nothing."""
    fields = onsite.stat(pid)
    if not fields or int(fields[6]) & KERNEL_THREAD:
        return None
    door = f"/proc/{pid}"
    threads = tuple(_threads(pid)) if fields[0] in "ZX" else ()
    if fields[0] in "ZX":
        if not threads:
            return None
        door = f"{door}/task/{threads[0]}"  # the leader's own files are closed to it
    ticks = int(fields[19])
    try:
        process = Process(
            pid,
            int(fields[1]),
            os.stat(door).st_uid,
            _words(door),
            boot_s + ticks / TICKS_PER_S,
            ticks,
            threads,
        )
    except OSError:
        return None
    return _looked_into(process, door)


def _looked_into(process: Process, door: str) -> Process | None:
    try:
        links, (maps, places) = _links(door), _mappings(door)
        deleted = _deleted_output(door, links)
    except PermissionError:
        return replace(process, is_readable=False)
    except OSError:
        return None  # it has ended
    return replace(process, links=tuple(links.values()), maps=maps, places=places, deleted=deleted)


def _threads(pid: int) -> list[int]:
    """Threads that live."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    states = ((int(task), onsite.stat(int(task))) for task in tasks)
    return [task for task, fields in states if fields and fields[0] not in "ZX"]


def _words(door: str) -> tuple[str, ...]:
    with open(f"{door}/cmdline", encoding="utf-8", errors="replace") as file:
        words = [word for word in file.read().split("\0") if word]
    if words:
        return tuple(words)
    with open(f"{door}/comm", encoding="utf-8", errors="replace") as file:
        return (file.read().strip(),)


def _links(door: str) -> dict[str, str]:
    """Names of its open files, by descriptor."""
    found = {}
    for descriptor in os.listdir(f"{door}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found[descriptor] = os.readlink(f"{door}/fd/{descriptor}")
    return found


def _mappings(door: str) -> tuple[tuple[str, ...], frozenset[Place]]:
    """Names of the files that it maps, and their places."""
    names, places = set(), set()
    with open(f"{door}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            _, _, _, device, inode, *name = line.rstrip("\n").split(maxsplit=5)
            if inode != "0" and name:
                major, minor = (int(part, 16) for part in device.split(":"))
                places.add((os.makedev(major, minor), int(inode)))
                names.add(name[0])
    return tuple(names), frozenset(places)


def _deleted_output(door: str, links: Mapping[str, str]) -> str:
    """The file that its standard output or error goes to and that was deleted; else empty.

    Files that never had a name (memfd_create, O_TMPFILE, whose links show the inode) were no logs.
    """
    for descriptor in ("1", "2"):
        link, mark, rest = links.get(descriptor, "").partition(DELETED)
        if not mark or rest or link.startswith("/memfd:"):
            continue
        with suppress(FileNotFoundError):
            status = os.stat(f"{door}/fd/{descriptor}")
            if status.st_nlink == 0 and Path(link).name != f"#{status.st_ino}":
                return link
    return ""
