"""What an earlier run may have left: processes, and segments of shared memory."""

import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diagnostics.preflight.line import Line, Seen, ok, problem, size, unknown
from diagnostics.processes import DELETED, duration, is_worker

SHM = Path("/dev/shm")
# torch, multiprocessing, joblib, POSIX semaphores, NCCL, CUDA, OpenMP, Open MPI.
SEGMENT = re.compile(
    r"(torch_|psm_|wnsm_|sem\.|loky-|joblib_|nccl-|cuda\.shm|__KMP_|vader_|sm_segment)"
)
SHOWN = 8
BLOCK_BYTES = 512  # of st_blocks


def visibility(seen: Seen) -> Line:
    """Whether all processes can be looked into: else none of the others can say that all is well.

    Those outside of this container are never to be seen.
    """
    name, table = "processes", seen.table
    if table.gap:
        return unknown(name, table.gap)
    return ok(name, f"{len(table.processes)} looked into, here; not outside of a container")


def gpu_holders(seen: Seen) -> Line:
    """Whoever has a GPU open holds memory on it, whether or not nvidia-smi shows it."""
    found = [
        (process, f"holds {', '.join(process.devices(seen.gpu))}")
        for process in seen.table.holders(seen.gpu)
    ]
    return seen.leftovers("GPU holders", "no process holds a GPU", found)


def zombie_leaders(seen: Seen) -> Line:
    """The main thread has ended, others have not: ps shows <defunct>, and all is still held."""
    found = [
        (p, f"its main thread has ended, {len(p.threads)} thread(s) live on")
        for p in seen.table.processes
        if p.threads
    ]
    return seen.leftovers("zombie leaders", "no dead process has living threads", found)


def orphans(seen: Seen) -> Line:
    """Python workers whose parent has died, so that init, or the user's systemd, has them now."""
    name, everybody = "orphans", seen.table.processes
    if _is_python(1):  # the trainer itself is init, as in many containers: they are its own
        return unknown(name, "process 1 is a Python: its own workers look like orphans")
    if not _environment(os.getpid()):
        return unknown(name, "/proc does not show the environment of even this process")
    inits = {1, *(p.pid for p in everybody if p.name == "systemd")}
    adopted = [p for p in everybody if p.parent in inits and "python" in p.name]
    found = [
        (p, "is a worker without its parent")
        for p in adopted
        if is_worker(p.words, _environment(p.pid))
    ]
    return seen.leftovers(name, "no worker has lost its parent", found)


def _environment(pid: int) -> Mapping[str, str]:
    """Empty where it may not be read: such a process is among those that cannot be looked into."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in pairs)


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("python")
    except OSError:
        return False


def deleted_outputs(seen: Seen) -> Line:
    """Whatever they write is lost when they end."""
    found = [
        (process, f"writes into {process.deleted}, which is deleted")
        for process in seen.table.processes
        if process.deleted
    ]
    save = "Save what it wrote: cp /proc/PID/fd/1 FILE. "
    return seen.leftovers("deleted logs", "no process writes into a deleted file", found, save)


class Entry(NamedTuple):
    """Something in /dev/shm."""

    path: Path
    status: os.stat_result

    @property
    def is_kept(self) -> bool:
        """Whether somebody seems to have put it there: a directory, a file with an extension."""
        is_segment = SEGMENT.match(self.path.name) is not None
        return not stat.S_ISREG(self.status.st_mode) or bool(self.path.suffix and not is_segment)

    def __str__(self) -> str:
        age = duration(time.time() - self.status.st_mtime)
        return f"{self.path} ({size(self.status.st_size)}, {age} old)"


def shared_memory(seen: Seen) -> Line:
    """Segments and semaphores that nobody maps stay until a reboot.

    A directory or a file with an extension was put there on purpose, a model for instance.
    """
    name = "shared memory"
    try:
        used, entries = _inodes_in_use(), list(_entries())
    except OSError as error:
        return unknown(name, f"{SHM} cannot be read: {error.strerror}")
    kept = [entry.path.name for entry in entries if entry.is_kept]
    told = [f"kept on purpose, it seems: {', '.join(kept)}"] if kept else []
    left = [e for e in entries if not e.is_kept and _is_left(e, seen)]
    if left:
        return _left(seen, name, left, told)
    if seen.table.blind:
        return unknown(name, seen.table.blind)
    missing = min(used, _inodes_in_use()) - _inodes_seen(entries, seen)
    if missing > 0:
        said = f"{SHM} has {missing} file(s) that neither it nor a process shows"
        return unknown(name, said, *told)
    if not entries:
        return ok(name, f"nothing is in {SHM}")
    return ok(name, f"all of {len(entries)} entries of {SHM} are in use or kept", *told)


def _left(seen: Seen, name: str, left: list[Entry], told: list[str]) -> Line:
    shown = [*map(str, left[:SHOWN]), *(["..."] if len(left) > SHOWN else [])]
    total = size(sum(entry.status.st_blocks * BLOCK_BYTES for entry in left))
    if seen.table.gap:
        said = f"{len(left)} segment(s) that no process seen maps, {total} in memory"
        return unknown(name, said, *shown, *told)
    names = " ".join(shlex.quote(str(entry.path)) for entry in left[:SHOWN])
    said = f"{len(left)} segment(s) that nobody maps, {total} in memory"
    return problem(
        name, said, *shown, *told, remedy=f"Unless another container shares {SHM}: rm {names}"
    )


def _entries() -> Iterator[Entry]:
    """Raises OSError."""
    for path in sorted(SHM.iterdir()):
        try:
            yield Entry(path, path.lstat())
        except FileNotFoundError:
            continue


def _is_left(entry: Entry, seen: Seen) -> bool:
    """Whether it was there when the processes were looked at, and none had it."""
    place = (entry.status.st_dev, entry.status.st_ino)
    name = str(entry.path)
    everybody = (*seen.table.processes, *seen.table.above)
    in_use = any(place in p.places or name in p.opened for p in everybody)
    return not in_use and entry.status.st_ctime < seen.table.began_s


def _inodes_in_use() -> int:
    """The root of the file system not counted; 0 where it does not count them."""
    room = os.statvfs(SHM)
    return max(0, room.f_files - room.f_ffree - 1)


def _inodes_seen(entries: list[Entry], seen: Seen) -> int:
    """Those that have a name, and those without that a process shows."""
    below = sum(len(names) + len(files) for _, names, files in os.walk(SHM))
    nameless = {
        path
        for process in (*seen.table.processes, *seen.table.above)
        for path in process.opened
        if path.startswith(f"{SHM}/") and path.endswith(DELETED)
    }
    return (below if entries else 0) + len(nameless)
