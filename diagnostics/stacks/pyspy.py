"""py-spy as a child: it never stops the process it looks at, nor outlives its time limit."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnostics.stacks.proc import look
from diagnostics.stacks.threads import Frame, Kernel, Thread

OVERRIDE = "DFLASH_PY_SPY"
LOOKS = 3
"""Without stopping the process a look may meet memory that is just being changed."""


class Refused(Exception):
    """No stacks could be read; `remedy` says what would help."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def sample(pid: int, *, native: bool = False, apart_s: float = 0.3) -> list[Thread]:
    """The threads, looked at twice: each knows whether it moved, and what the kernel says of it.

    The process goes on running meanwhile. Raises Refused.
    """
    before = {thread.tid: (thread, look(pid, thread.tid)) for thread in dump(pid)}
    time.sleep(apart_s)
    return [_compared(thread, pid, before) for thread in dump(pid, native=native)]


def _compared(thread: Thread, pid: int, before: dict[int, tuple[Thread, Kernel]]) -> Thread:
    kernel = look(pid, thread.tid)
    if thread.tid not in before:
        return replace(thread, kernel=kernel)
    earlier, earlier_kernel = before[thread.tid]
    ran = kernel.cpu_ticks > earlier_kernel.cpu_ticks
    return replace(thread, kernel=kernel, moved=ran or earlier.python != thread.python)


def dump(pid: int, *, native: bool = False, timeout_s: float = 20.0) -> list[Thread]:
    """The threads of a process as py-spy has them.

    With `native`, C frames are shown as well; for that py-spy stops the process for some tenths of
    a second, and it can hang on one in uninterruptible sleep until it is killed. Raises Refused.
    """
    command = [str(program()), "dump", "--json", "--locals", "--pid", str(pid)]
    command.append("--native" if native else "--nonblocking")
    for _ in range(1 if native else LOOKS):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            said = f"py-spy gave no answer about process {pid} within {timeout_s:g} s"
            raise Refused(said) from None
        if done.returncode == 0:
            return [thread(dumped) for dumped in json.loads(done.stdout)]
        if _is_final(pid, done.stderr):
            break
    raise Refused(*_why(pid, done.stderr))


def _is_final(pid: int, said: str) -> bool:
    """Whether another look would end alike. What a running process changes meanwhile passes."""
    return "ermission" in said or "EPERM" in said or not Path(f"/proc/{pid}").exists()


def program() -> Path:
    """py-spy of this environment, or the one that $DFLASH_PY_SPY names. Raises Refused."""
    for path in _places():
        if os.access(path, os.X_OK):
            return path
    raise Refused(
        f"py-spy is not installed beside {sys.executable}",
        f"Type: {sys.executable} -m pip install py-spy, or set {OVERRIDE} to its path.",
    )


def _places() -> Iterator[Path]:
    if named := os.environ.get(OVERRIDE):
        yield Path(named)
        return
    yield Path(sys.executable).with_name("py-spy")
    try:
        files = importlib.metadata.files("py-spy") or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (Path(str(file.locate())) for file in files if file.name == "py-spy")


def _why(pid: int, said: str) -> tuple[str, str]:
    """What py-spy's last words mean, and what would help. The wording is that of py-spy 0.4."""
    lines = said.strip().splitlines() or ["no reason given"]
    # Causes and a backtrace follow the first line.
    last = " ".join(line.strip() for line in lines[:3] if "backtrace" not in line.lower())
    if not Path(f"/proc/{pid}").exists():
        return f"there is no process {pid}", ""
    remedy = ""
    if _is_final(pid, last):
        remedy = (
            "Run this as the same user or as root; in a container it needs the capability "
            "SYS_PTRACE (docker run --cap-add SYS_PTRACE); elsewhere see "
            "/proc/sys/kernel/yama/ptrace_scope."
        )
    return f"py-spy cannot read process {pid}: {last}", remedy


def thread(dumped: dict[str, Any]) -> Thread:
    """One thread of py-spy's JSON."""
    tid = dumped["os_thread_id"] or dumped["thread_id"]
    # Python names the main thread when it imports threading.
    name = dumped["thread_name"] or ("MainThread" if tid == dumped.get("pid") else "")
    return Thread(name, tid, tuple(map(_frame, dumped["frames"])), dumped["owns_gil"])


def _frame(dumped: dict[str, Any]) -> Frame:
    name, path = dumped["name"], dumped["filename"]
    # A native frame lies in a shared library, or in C sources where there are debug symbols.
    if dumped.get("module") or not path.endswith((".py", ">")):
        return Frame(name.rpartition("::")[2])
    held = (local["addr"] for local in dumped.get("locals") or () if local["name"] == "self")
    return Frame(name.rpartition(".")[2], path, dumped["line"], next(held, None))
