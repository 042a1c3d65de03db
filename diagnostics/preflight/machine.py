"""The machine: limits, memory, clock, caches, ports, tmux."""

import getpass
import os
import re
import resource
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from diagnostics.launch import onsite, tmux_session
from diagnostics.preflight.line import Line, Seen, ok, problem, size, unknown

OPEN_FILES = 1024
THREADS = 1000  # a run with compile workers starts some hundreds
EARLIEST = "2024-01-01"
SKEW_S = 120.0  # a network file system's clock may be a little ahead
IDLE_HUGE_PAGES = 0.1  # of all memory, reserved and used by nobody
INFINITY = resource.RLIM_INFINITY
INFINIBAND = Path("/dev/infiniband")


def limits(seen: Seen) -> Line:
    """The limits of this shell that end a run at some later hour."""
    name = "limits"
    wrong = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != INFINITY and files < OPEN_FILES:
        wrong.append(f"open files: {files}, should be at least {OPEN_FILES} (ulimit -n)")
    for limit, what, flag in (
        (resource.RLIMIT_AS, "address space, which CUDA reserves in TiB", "v"),
        (resource.RLIMIT_FSIZE, "size of a file, of which a checkpoint needs GiB", "f"),
        (resource.RLIMIT_CPU, "CPU seconds", "t"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != INFINITY:
            wrong.append(f"{what}: limited to {most} (ulimit -{flag})")
    most, used = resource.getrlimit(resource.RLIMIT_NPROC)[0], _threads_of_user()
    if used == 0:
        return unknown(name, "this user's threads cannot be counted")
    if os.geteuid() and most != INFINITY and most - used < THREADS:
        wrong.append(f"threads: {used} of {most}, should leave {THREADS} (ulimit -u)")
    if wrong:
        return problem(
            name,
            f"{len(wrong)} limit(s)",
            *wrong,
            remedy="Raise it with the ulimit that is named, in the shell that starts the run.",
        )
    return ok(name, f"{_shown(files)} open files, {used} of {_shown(most)} threads")


def _shown(limit: int) -> str:
    return "unlimited" if limit == INFINITY else str(limit)


def _threads_of_user() -> int:
    found = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            found += process.info["num_threads"] or 0
    return found


def memory(seen: Seen) -> Line:
    """Memory that huge pages keep from everybody, and memory that can be locked."""
    name = "memory"
    info = _meminfo()
    if "MemTotal" not in info or "MemAvailable" not in info:
        return unknown(name, "/proc/meminfo does not say how much there is")
    total, free = info["MemTotal"], info["MemAvailable"]
    idle = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == INFINITY else size(locked)
    said = f"{size(free)} of {size(total)} available, {shown} may be locked"
    if idle > IDLE_HUGE_PAGES * total:
        told = f"{size(idle)} are reserved for huge pages that nobody uses"
        return problem(name, told, said, remedy="Type: sysctl vm.nr_hugepages=0")
    if INFINIBAND.exists() and locked != INFINITY:
        told = f"InfiniBand registers memory, of which {shown} may be locked"
        return problem(name, told, said, remedy="Raise it: ulimit -l unlimited")
    return ok(name, said)


def _meminfo() -> dict[str, int]:
    """Bytes, or a count of huge pages."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return {}
    found = re.findall(r"^(\w+):\s+(\d+)( kB)?$", text, re.MULTILINE)
    return {key: int(value) * (1024 if unit else 1) for key, value, unit in found}


def clock(seen: Seen) -> Line:
    """A clock that is wrong makes logs that cannot be put in order, and stale builds."""
    name = "clock"
    now_s = time.time()
    shown = time.strftime("%F %T %Z", time.localtime(now_s))
    if shown < EARLIEST:
        remedy = "Set it: timedatectl set-ntp true"
        return problem(name, f"it says {shown}, before {EARLIEST}", remedy=remedy)
    times = {path: _mtime(path) for path in _files(seen)}
    if not any(times.values()):
        return unknown(name, f"{shown}: no file's time to compare it with")
    newest = max(times, key=lambda path: times[path])
    ahead_s = times[newest] - now_s
    if ahead_s > SKEW_S:
        said = f"it says {shown}, and {newest} was written {ahead_s:.0f} s later"
        return problem(name, said, remedy="Set the clock, or touch the file if that one is wrong.")
    return ok(name, f"{shown}, later than all of {len(times)} files looked at")


def _files(seen: Seen) -> Iterator[Path]:
    """This program's own, and the run's."""
    yield from Path(__file__).parent.glob("*.py")
    if seen.run is not None and seen.run.directory.is_dir():
        yield from seen.run.directory.iterdir()


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def caches(seen: Seen) -> Line:
    """Where torch.compile and Triton put what they compile: writable, and nobody else's.

    Inductor runs the code that it finds there.
    """
    name = "compile cache"
    wrong, shown = [], []
    for directory in _cache_directories(seen.environ):
        nearest = nearest_existing(directory)
        wrong += not_writable(nearest)
        status = nearest.stat()
        if nearest == directory and status.st_uid != os.geteuid():
            wrong.append(f"{directory} belongs to user {status.st_uid}, and its code would be run")
        elif nearest == directory and status.st_mode & stat.S_IWOTH:
            wrong.append(f"everybody may write into {directory}, and its code would be run")
        shown.append(f"{directory}{'' if nearest == directory else ' (to be made)'}")
    if wrong:
        remedy = "Name others: TORCHINDUCTOR_CACHE_DIR=..., TRITON_CACHE_DIR=..."
        return problem(name, wrong[0], *wrong[1:], remedy=remedy)
    if not shown:
        return unknown(name, "no directory is known for it")
    return ok(name, ", ".join(shown))


def _cache_directories(environ: dict[str, str]) -> list[Path]:
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch makes it
    default = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR") or default
    triton = environ.get("TRITON_CACHE_DIR") or Path(inductor) / "triton"
    return [Path(inductor).absolute(), Path(triton).absolute()]


def nearest_existing(path: Path) -> Path:
    """The path, or the first of its parents that can be seen."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def not_writable(directory: Path) -> list[str]:
    """Why no file can be made in a directory that exists; a nameless one is tried."""
    wrong = [why for _, why in onsite.obstacles(str(directory / "x"))]
    try:
        with tempfile.TemporaryFile(dir=directory):
            return wrong
    except OSError as error:
        return wrong or [f"no file can be made in {directory}: {error.strerror}"]


def ports(seen: Seen) -> Line | None:
    """Whether the ports that the run will listen on are free: bound for a moment, and looked up."""
    name = "ports"
    wanted = list(seen.ports)
    said = seen.environ.get("MASTER_PORT", "")
    if said:
        if not said.isdigit() or not 0 < int(said) < 1 << 16:
            return problem(name, f"MASTER_PORT={said} is no port", remedy="Set it to 1024-65535.")
        wanted.append(int(said))
    if not wanted:
        return None
    listeners = _listeners()
    told = []
    for port in dict.fromkeys(wanted):
        why = _why_not(port)
        if port in listeners:
            pid = listeners[port]
            why = f"process {pid} listens there" if pid else why or "somebody listens there"
        if why:
            told.append(f"{port}: {why}")
    if told:
        remedy = "Choose another port, or end who listens."
        return problem(name, f"{len(told)} of {len(wanted)} cannot be had", *told, remedy=remedy)
    return ok(name, f"free: {', '.join(map(str, wanted))}")


def _listeners() -> dict[int, int | None]:
    """Ports that are listened on, and by which process, where that may be known."""
    return {
        each.laddr.port: each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr
    }


def _why_not(port: int) -> str:
    """Why nobody could listen there, on any address; empty if one can."""
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_dualstack_ipv6():
        families.append((socket.AF_INET6, "::"))
    for family, address in families:
        try:
            socket.create_server((address, port), family=family).close()
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return ""


def tmux(seen: Seen) -> Line | None:
    """Whether a session of the name that was asked for can be made."""
    name = "tmux session"
    if seen.session is None:
        return None
    if shutil.which("tmux") and tmux_session.ask("-V") is None:
        return unknown(name, "tmux does not answer")
    why = tmux_session.why_not(seen.session, own=set())
    if why:
        remedy = f"Look: tmux attach -t {seen.session}; or choose another name."
        return problem(name, why, remedy=remedy)
    return ok(name, f"{seen.session} is free")
