"""Stacks that a process writes itself, on SIGUSR1: where nobody may look into it from outside.

A thread of its own writes them, while it holds the GIL. faulthandler's signal handler would read
the frames of threads that go on, and crash the process when one of them returns from a deep call
meanwhile. Only where C code holds the GIL, so that no thread goes on, that handler answers.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "stacks.txt"
SIGNAL = signal.SIGUSR1
WHILE_C_HOLDS_THE_GIL = signal.SIGUSR2
LIMIT_S = 5.0


@contextmanager
def stacks_on_signal(directory: Path) -> Iterator[None]:
    """Within, SIGUSR1 appends every thread's stack to `stacks.txt` there, and changes nothing.

    For the main thread.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(directory / FILE, flags, 0o600)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    writer = threading.Thread(
        target=_write_when_asked, args=(signals, descriptor), name="stacks", daemon=True
    )
    writer.start()
    # Python's C handler writes the number to the pipe, whatever the main thread does.
    before = signal.signal(SIGNAL, lambda *_: None), signal.set_wakeup_fd(wakeup)
    faulthandler.register(WHILE_C_HOLDS_THE_GIL, file=descriptor, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(WHILE_C_HOLDS_THE_GIL)
        signal.set_wakeup_fd(before[1])
        signal.signal(SIGNAL, before[0])
        os.close(wakeup)
        writer.join()
        os.close(signals)
        os.close(descriptor)


def _write_when_asked(signals: int, descriptor: int) -> None:
    while numbers := os.read(signals, 64):
        if SIGNAL in numbers:
            faulthandler.dump_traceback(descriptor, all_threads=True)


def size(directory: Path) -> int:
    """Bytes that have been written so far."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / FILE).stat().st_size
    return 0


def ask(pid: int, directory: Path) -> str:
    """Stacks from the process itself; empty where it does not answer, each time within `LIMIT_S`.

    A signal is sent only where a handler is installed: without one it would end the process. And
    none to a process that is stopped, which would answer both when it goes on.
    """
    for number in (SIGNAL, WHILE_C_HOLDS_THE_GIL):
        if not _handles(pid, number):
            return ""
        if dump := _answer(pid, number, directory):
            return dump
    return ""


def _answer(pid: int, number: int, directory: Path) -> str:
    before = now = size(directory)
    os.kill(pid, number)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        last, now = now, size(directory)
        if before < last == now:  # it has grown, and stopped growing
            break
    return (directory / FILE).read_bytes()[before:].decode(errors="replace")


def _handles(pid: int, number: int) -> bool:
    """Whether the process goes on and has a handler (State and SigCgt of proc(5), bit n - 1)."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        stopped = fields["State"].split()[0] in "Tt"
        return not stopped and bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)
    return False
