"""Stacks that a process writes itself, on SIGUSR1: where nobody may look into it from outside.

faulthandler writes them from C, in the signal handler: also while other C code holds the GIL.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "stacks.txt"
SIGNAL = signal.SIGUSR1
LIMIT_S = 5.0


@contextmanager
def stacks_on_signal(directory: Path) -> Iterator[None]:
    """Within, SIGUSR1 appends every thread's stack to `stacks.txt` there, and changes nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(directory / FILE, flags, 0o600)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(SIGNAL)
        os.close(descriptor)


def size(directory: Path) -> int:
    """Bytes that have been written so far."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / FILE).stat().st_size
    return 0


def ask(pid: int, directory: Path) -> str:
    """Stacks from the process itself; empty where it does not answer within `LIMIT_S` seconds.

    The signal is sent only where a handler is installed: without one it would end the process.
    """
    if not _handles(pid):
        return ""
    before = now = size(directory)
    os.kill(pid, SIGNAL)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        last, now = now, size(directory)
        if before < last == now:  # it has grown, and stopped growing
            break
    return (directory / FILE).read_bytes()[before:].decode(errors="replace")


def _handles(pid: int) -> bool:
    """Whether the process has a handler for the signal (SigCgt of proc(5), bit n - 1)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
