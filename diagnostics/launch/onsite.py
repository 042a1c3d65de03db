"""What runs on the trainer's side: opens its log, starts it, waits for it, reports every stage.

Stands alone on the standard library of Python 3.8 or newer: behind a prefix (`pct exec 200 --`),
where no file of ours exists, the text of this one is handed to a Python. The trainer writes into
its log directly, so that it goes on whoever else is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Callable, Dict  # noqa: UP035 (for Python 3.8)

Record = Dict[str, Any]  # noqa: UP006 (for Python 3.8)
Report = Callable[..., None]
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
WATCHED = {*FORWARDED, signal.SIGCHLD}
SI_KERNEL = 0x80  # si_code of what no process sent: a terminal that went away
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05  # until the first line is there
LONG_S = 3600.0
FIRST_BYTES = 1 << 16
TAIL_BYTES = 1 << 16
LEAST_BYTES = 1 << 20
NOT_STARTED = 127


def identity(pid: int) -> Record | None:
    """What tells a process from a later one with its number; None if it is not alive.

    `start_ticks` is field 22 of /proc/PID/stat, in clock ticks since the boot that `boot_id` names.
    """
    fields = stat(pid)
    return known(pid, fields) if fields and fields[0] not in "ZX" else None


def stat(pid: int) -> list[str]:
    """Fields 3 and on of /proc/PID/stat: its state, its parent...; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def known(pid: int, fields: list[str]) -> Record:
    return {"pid": pid, "start_ticks": int(fields[19]), "boot_id": boot_id()}


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def is_alive(process: Record | None) -> bool:
    """Whether the very process of an `identity` still runs."""
    now = identity(process["pid"]) if process else None
    return now is not None and process is not None and now.items() <= process.items()


# Before: is there anything in the way?


def obstacles(log: str) -> Iterator[tuple[str, str]]:
    """Why no new file can be made at `log`: a stable code, and what is wrong."""
    folder = os.path.dirname(log) or "."
    try:
        room = os.statvfs(os.path.join(folder, "."))
    except PermissionError:
        yield "not-writable", f"you may not enter {folder}"
        return
    except OSError:
        yield "directory-missing", f"there is no directory {folder}"
        return
    if room.f_flag & os.ST_RDONLY:
        yield "read-only", f"{folder} is on a file system that is mounted read-only"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield "not-writable", f"you may not make files in {folder}"
    if room.f_files and room.f_favail == 0:
        yield "no-inodes", f"the file system of {folder} has no inode left: no file can be made"
    elif room.f_blocks and room.f_bavail * room.f_frsize < LEAST_BYTES:
        yield "disk-full", f"the file system of {folder} is full"


def check(spec: Record) -> Record:
    """Where the program is to run: what is in the way of it, and the log's absolute path there."""
    log = os.path.abspath(spec["log"])
    wrong = list(obstacles(log))
    if os.path.lexists(log):
        wrong.append(("log-exists", f"{log} exists, and a log is never overwritten"))
    program, *arguments = spec["command"]
    if shutil.which(program) is None:
        wrong.append(("program-missing", f"there is no program {program}"))
    script = next((word for word in arguments if not word.startswith("-")), "")
    reads_scripts = re.match(r"(python|(ba|da|z|k)?sh)[\d.]*$", os.path.basename(program))
    if reads_scripts and re.search(r"\.(py|sh)$", script) and not os.path.isfile(script):
        wrong.append(("script-missing", f"there is no file {os.path.abspath(script)}"))
    return {"stage": "check", "log": log, "wrong": wrong}


# Afterwards: what is there to be seen?


def look(spec: Record) -> Record:
    """Whether the process of `spec` runs, what its log is now, and the log's last lines."""
    seen: Record = {"stage": "look", "pid_namespace": pid_namespace()}
    seen["alive"] = is_alive(spec.get("process"))
    seen["left"] = [each for each in spec.get("left", []) if is_alive(each)]
    try:
        with open(spec["log"], "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        return {**seen, "no_log": os.strerror(error.errno or 0)}
    log = {**place(status), "bytes": status.st_size, "written_s": status.st_mtime}
    return {**seen, **log, "tail": lines[-spec["lines"] :]}


def pid_namespace() -> str:
    """Which process ids are meant."""
    return os.readlink("/proc/self/ns/pid")


def place(status: os.stat_result) -> Record:
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return {"device": device, "inode": status.st_ino}


# Meanwhile.


def supervise(spec: Record, report: Report) -> int:
    """Start the trainer and wait for its end; returns what a shell would: 128 + N for signal N."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _adopt_orphans()
    try:
        os.chdir(spec.get("cwd") or ".")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOCTTY
        log = os.open(spec["log"], flags, 0o644)
    except OSError as error:
        report("failed", step="redirect", why=str(error))
        return NOT_STARTED
    report("redirect", path=os.path.abspath(spec["log"]), **place(os.fstat(log)))
    began_s, killed_before = time.monotonic(), _out_of_memory()
    try:
        pid = spawn(spec["command"], log, {**os.environ, "PYTHONUNBUFFERED": "1"})
    except OSError as error:
        os.write(log, f"dflash-diag launch: cannot start {spec['command'][0]}: {error}\n".encode())
        report("failed", step="exec", why=str(error))
        return NOT_STARTED
    # It may have ended already: until it is reaped, its start time can be read.
    report("exec", pid_namespace=pid_namespace(), **known(pid, stat(pid)))
    status = _until_it_ends(pid, log, began_s, report)
    report(
        "exit",
        **ending(status),
        after_s=round(time.monotonic() - began_s, 3),
        left=[process for child in _descendants() if (process := identity(child))],
        out_of_memory=_out_of_memory() - killed_before,
    )
    return 128 - status if status < 0 else status


def spawn(command: list[str], output: int, env: dict[str, str]) -> int:
    """In a session of its own, with no signal blocked or ignored. Raises OSError."""
    null = os.open(os.devnull, os.O_RDONLY)
    actions = [
        (os.POSIX_SPAWN_DUP2, null, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    try:
        return os.posix_spawnp(
            command[0],
            command,
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef={*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGQUIT},
        )
    finally:
        os.close(null)


def _until_it_ends(pid: int, log: int, began_s: float, report: Report) -> int:
    """The trainer's status as subprocess has it."""
    is_silent, status = True, None
    while status is None:
        got = signal.sigtimedwait(WATCHED, POLL_S if is_silent else LONG_S)
        if got is not None and got.si_signo != signal.SIGCHLD and is_meant(got, report):
            os.kill(pid, got.si_signo)
        status = _reap(pid)
        if is_silent and re.search(b"[\r\n]", os.pread(log, FIRST_BYTES, 0)):
            is_silent = False
            report("first_line", after_s=round(time.monotonic() - began_s, 3))
    return status


def is_meant(got: Any, report: Report) -> bool:
    """Whether the trainer is to get this signal: a lost terminal is nothing to it."""
    name = signal.Signals(got.si_signo).name
    if name == "SIGHUP" and got.si_code == SI_KERNEL:
        report("hang-up")
        return False
    report("forwarded", signal=name, sender=got.si_pid)
    return True


def _reap(pid: int) -> int | None:
    """Every child that has ended, orphans too; the trainer's status if it is among them."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                found = exit_code(ended[1])
    except ChildProcessError:
        pass
    return found


def exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def ending(status: int) -> Record:
    if status >= 0:
        return {"status": status}
    try:
        return {"signal": signal.Signals(-status).name}
    except ValueError:
        return {"signal": f"signal {-status}"}  # a real-time one


def _adopt_orphans() -> None:
    """Workers that outlive the trainer become ours, so that they can be named (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> list[int]:
    stats = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    ours = [os.getpid()]
    for each in ours:
        ours += [pid for pid, stat in stats.items() if stat and int(stat[1]) == each]
    return ours[1:]


def _out_of_memory() -> int:
    """How many processes this kernel has killed for want of memory."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return int(dict(line.split() for line in file).get("oom_kill", 0))
    except OSError:
        return 0


def inside(spec: Record) -> int:
    """As `supervise`, on the other side: reports go to standard output, while anybody reads it."""

    def report(stage: str, **fields: Any) -> None:
        with suppress(OSError):  # the connection is lost: the trainer is not
            os.write(1, json.dumps({"stage": stage, **fields}).encode() + b"\n")

    os.dup2(1, 2)  # one connection, so that its end can be seen
    if os.getsid(0) != os.getpid() and os.getpgrp() != os.getpid():
        os.setsid()
    return supervise(spec, report)


def send(spec: Record) -> Record:
    """The signal, to the very process that is meant."""
    if is_alive(spec["process"]):
        os.kill(spec["process"]["pid"], spec["number"])
    return {"stage": "sent"}


def main(verb: str, given: str) -> int:
    """`inside`, `check`, `look` or `send`, with JSON; answers in JSON."""
    if verb == "inside":
        return inside(json.loads(given))
    answer = {"check": check, "look": look, "send": send}[verb](json.loads(given))
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
