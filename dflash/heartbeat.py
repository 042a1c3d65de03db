"""What every loop of a run is doing, in a small mapped file that survives the process.

The loops write it as they go; the watchdog, `dflash-diag stacks --run` and whoever comes after a
SIGKILL read it: the pages belong to the kernel, so that nothing is lost with the process. Writing
takes no lock and no system call. Times are on the machine's monotonic clock, which all processes
share until the next boot; the header has the wall clock too.

    header | one slot per loop: its phase, since when, its limit | ring of the last events
"""

import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVarTuple

FILE = "heartbeat"
EVENTS = 1024
NO_LIMIT = 0.0

Args = TypeVarTuple("Args")
_MAGIC = b"dflash1\n"
_HEADER = struct.Struct("<8sIIqQdd")  # magic, loops, events, pid, its start, monotonic s, wall s
_SLOT = struct.Struct("<Qdd32s88s")  # version, since_s, limit_s, loop, phase
_EVENT = struct.Struct("<Qd32s88s")  # number, at_s, loop, text
_mine = threading.local()


@dataclass(frozen=True)
class Loop:
    """A loop's state. `limit_s` is NO_LIMIT while it waits for another loop or has ended."""

    name: str
    phase: str
    since_s: float
    limit_s: float

    def elapsed_s(self, now_s: float | None = None) -> float:
        """Seconds in this phase, now or at `now_s`."""
        return (time.monotonic() if now_s is None else now_s) - self.since_s

    @property
    def has_limit(self) -> bool:
        """Whether it works on something."""
        return self.limit_s > NO_LIMIT

    def is_overdue(self, now_s: float) -> bool:
        """Whether it works on one thing for longer than its limit."""
        return self.has_limit and self.elapsed_s(now_s) > self.limit_s


@dataclass(frozen=True)
class Event:
    """Something that a loop began, `at_s` on the monotonic clock."""

    at_s: float
    loop: str
    text: str


@dataclass(frozen=True)
class Snapshot:
    """The whole file. `pid_start` is field 22 of /proc/PID/stat, which tells a reused pid."""

    pid: int
    pid_start: int
    loops: tuple[Loop, ...]
    events: tuple[Event, ...]
    monotonic_s: float
    wall_s: float

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it still runs."""
        return process_start(self.pid) == self.pid_start

    def at(self, monotonic_s: float) -> float:
        """The wall clock's time (seconds since the epoch) of a moment on the monotonic clock."""
        return self.wall_s + monotonic_s - self.monotonic_s


class Heartbeat:
    """The writing side; each loop has a slot of its own, named when it is made."""

    def __init__(
        self, path: Path, names: Sequence[str], *, start_limit_s: float, limit_s: float
    ) -> None:
        """Create the file, for the user only.

        Args:
            start_limit_s, limit_s: how long one piece of work may take before and after `started`.
        """
        size = _HEADER.size + len(names) * _SLOT.size + EVENTS * _EVENT.size
        path.unlink(missing_ok=True)  # an earlier run's: whoever maps it keeps it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.path = path
        self._names = {name: i for i, name in enumerate(names)}
        self._start_limit_s, self._limit_s = start_limit_s, limit_s
        self._numbers = itertools.count(1)
        pid = os.getpid()
        started = process_start(pid) or 0
        clocks = (time.monotonic(), time.time())
        _HEADER.pack_into(self._map, 0, _MAGIC, len(names), EVENTS, pid, started, *clocks)
        for name in names:
            _Slot(self, name).write("not started", NO_LIMIT)

    def run(self, name: str, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call `fn(*args)` as the loop so named: `working` and `waiting` then write its slot."""
        with self.loop(name) as slot:
            slot.write("starting", slot.limit_s)
            fn(*args)

    @contextmanager
    def loop(self, name: str) -> Iterator["_Slot"]:
        """Within, the calling thread is the loop so named."""
        slot = _mine.slot = _Slot(self, name)
        try:
            yield slot
        finally:
            del _mine.slot
            slot.write("ended", NO_LIMIT)


class _Slot:
    """One loop's place in the file, written by its thread only."""

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat, self._name = heartbeat, name.encode()
        self._offset = _HEADER.size + heartbeat._names[name] * _SLOT.size
        self._ring = _HEADER.size + len(heartbeat._names) * _SLOT.size
        self._version = 0
        self.limit_s = heartbeat._start_limit_s

    def started(self) -> None:
        self.limit_s = self._heartbeat._limit_s

    def write(self, phase: str, limit_s: float) -> None:
        text, now_s, into = phase.encode()[:88], time.monotonic(), self._heartbeat._map
        # Odd while it is being written, so that a reader takes it again.
        struct.pack_into("<Q", into, self._offset, self._version + 1)
        self._version += 2
        _SLOT.pack_into(into, self._offset, self._version - 1, now_s, limit_s, self._name, text)
        struct.pack_into("<Q", into, self._offset, self._version)
        number = next(self._heartbeat._numbers)
        offset = self._ring + number % EVENTS * _EVENT.size
        _EVENT.pack_into(into, offset, 0, now_s, self._name, text)
        struct.pack_into("<Q", into, offset, number)


def working(on: str) -> None:
    """Say what the calling loop works on from now on; without a heartbeat nothing happens."""
    if slot := getattr(_mine, "slot", None):
        slot.write(on, slot.limit_s)


def waiting(for_what: str) -> None:
    """Say that the calling loop waits for another one, which has a limit of its own."""
    if slot := getattr(_mine, "slot", None):
        slot.write(f"waits for {for_what}", NO_LIMIT)


def started() -> None:
    """From now on the calling loop's work has the limit of work after the start."""
    if slot := getattr(_mine, "slot", None):
        slot.started()


def read(path: Path, *, with_events: bool = True) -> Snapshot:
    """What the file says now. Raises OSError, and ValueError if it is no heartbeat."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        magic, loops, events, pid, started, monotonic_s, wall_s = _HEADER.unpack_from(mapped)
        if magic != _MAGIC:
            raise ValueError(f"{path} is no heartbeat file of this version")
        slots = tuple(_read_slot(mapped, _HEADER.size + i * _SLOT.size) for i in range(loops))
        ring = _HEADER.size + loops * _SLOT.size
        happened = _read_events(mapped, ring, events) if with_events else ()
        return Snapshot(pid, started, slots, happened, monotonic_s, wall_s)


def _read_slot(mapped: mmap.mmap, offset: int) -> Loop:
    for _ in range(1000):
        version, since_s, limit_s, name, phase = _SLOT.unpack_from(mapped, offset)
        if version % 2 == 0 and struct.unpack_from("<Q", mapped, offset)[0] == version:
            break  # else its thread is writing, or was killed while it was
    return Loop(_text(name), _text(phase), since_s, limit_s)


def _read_events(mapped: mmap.mmap, offset: int, count: int) -> tuple[Event, ...]:
    rows = (_EVENT.unpack_from(mapped, offset + i * _EVENT.size) for i in range(count))
    written = sorted(row for row in rows if row[0])
    return tuple(Event(at_s, _text(loop), _text(text)) for _, at_s, loop, text in written)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])
