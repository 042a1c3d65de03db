"""The processes that a trial started, however they daemonize: found, watched and ended.

The process that runs a trial is a "child subreaper" (Linux): whatever its descendants leave behind,
through setsid, nohup or tmux's double fork, becomes its own child and not init's.
"""

import ctypes
import os
import time
from collections.abc import Callable

import psutil

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
POLL_S = 0.01
BUSY = {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_WAKING}


def adopt_orphans() -> None:
    """Make this process the one to which orphaned descendants go. Raises OSError."""
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_mounts() -> None:
    """Give this process mounts of its own, which end with it. Raises OSError if not root."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def living() -> list[psutil.Process]:
    """All descendants that have not ended; those that were left to us are reaped."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return alive


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it came true in time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


class Quiet:
    """True once no descendant has started, ended or been busy for so long."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._pids: set[int] = set()
        self._since_s = time.monotonic()

    def __call__(self) -> bool:
        processes = living()
        pids = {process.pid for process in processes}
        if pids != self._pids or any(map(_is_busy, processes)):
            self._pids, self._since_s = pids, time.monotonic()
        return time.monotonic() - self._since_s >= self._for_s


def _is_busy(process: psutil.Process) -> bool:
    try:
        return process.status() in BUSY
    except psutil.NoSuchProcess:
        return True


def end_all(within_s: float = 10.0) -> None:
    """Kill every descendant, again and again while they fork. Raises TimeoutError if some stay."""

    def all_gone() -> bool:
        processes = living()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return not processes

    if not wait_until(all_gone, within_s):
        names = ", ".join(f"{p.name()} ({p.pid})" for p in living())
        raise TimeoutError(f"these processes of a trial cannot be killed: {names}")
