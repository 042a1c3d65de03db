"""What the kernel says of a thread: its state, the call it is blocked in, who holds its mutex."""

import os
import signal
import struct
from pathlib import Path

from diagnostics.stacks.threads import Kernel

FUTEX = 202  # numbers of x86-64; elsewhere nothing is concluded from them
READ, WRITE, POLL, SELECT, WAIT4, EPOLL, PSELECT, PPOLL, WAITID = (
    0,
    1,
    7,
    23,
    61,
    232,
    270,
    271,
    247,
)
RECVFROM, RECVMSG, ACCEPT, CONNECT = 45, 47, 43, 42
NANOSLEEP, CLOCK_NANOSLEEP = 35, 230
ON_FD = {READ, WRITE, RECVFROM, RECVMSG, ACCEPT, CONNECT}
SIGNALS = (signal.SIGHUP, signal.SIGALRM, signal.SIGTERM)  # SIGUSR1 and 2 are often for dumps
FUTEX_WAIT_PRIVATE, CONTENDED = 0x80, 2


def look(pid: int, tid: int) -> Kernel:
    """Whatever may be read of a thread; nothing is raised."""
    task = Path(f"/proc/{pid}/task/{tid}")
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Kernel()
    syscall = _syscall(task)
    return Kernel(
        fields[0],
        syscall,
        _fd(pid, syscall),
        _mutex_owner(pid, syscall),
        int(fields[11]),
        _has_limit(syscall),
        _handles_signals(task),
    )


def _syscall(task: Path) -> tuple[int, ...] | None:
    if os.uname().machine != "x86_64":
        return None
    try:
        words = (task / "syscall").read_text().split()
    except OSError:
        return None
    if words[:1] == ["running"] or not words or words[0] == "-1":
        return None
    return (int(words[0]), *(int(word, 16) for word in words[1:7]))


def _fd(pid: int, syscall: tuple[int, ...] | None) -> str:
    if syscall is None or syscall[0] not in ON_FD:
        return ""
    try:
        return os.readlink(f"/proc/{pid}/fd/{syscall[1]}")
    except OSError:
        return f"descriptor {syscall[1]}"


def _has_limit(syscall: tuple[int, ...] | None) -> bool:
    """The fourth argument of a futex call that waits points to its time limit, if it has one."""
    return syscall is not None and syscall[0] == FUTEX and syscall[4] != 0


def _handles_signals(task: Path) -> bool:
    try:
        status = (task / "status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
    return any(caught >> (number - 1) & 1 for number in SIGNALS)


def _mutex_owner(pid: int, syscall: tuple[int, ...] | None) -> int | None:
    """glibc's pthread_mutex_t: lock word, count, owner's thread id, four bytes each."""
    if not syscall or syscall[0] != FUTEX or syscall[2:4] != (FUTEX_WAIT_PRIVATE, CONTENDED):
        return None
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(syscall[1])
            word, _count, owner = struct.unpack("<iii", memory.read(12))
    except (OSError, OverflowError, struct.error):
        return None
    return owner if word == CONTENDED and Path(f"/proc/{pid}/task/{owner}").exists() else None
