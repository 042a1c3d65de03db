"""Who keeps a GPU busy, though the launch has failed."""

from diagnostics import gpus
from diagnostics.launch.finding import Finding, excluded, first, fits, unknown
from diagnostics.launch.remains import Process, Remains


def worker_left(remains: Remains) -> Finding:
    """The main process died; a worker in a group or session of its own lives on."""
    found = (
        fits(f"{process} was a worker, and its main process is gone", process)
        for process in remains.ours
        if process.leaderless and process.holds(remains.log)
    )
    return first(found, "no process of the launch has lost its main one")


def leftover(remains: Remains) -> Finding:
    """A process of an earlier run, which has nothing to do with the launch."""
    if remains.since is None and any(p.holds(remains.log) for p in remains.processes):
        return unknown("say --since TIME: do these run longer than the launch?")
    found = (
        fits(f"{process} ran before the launch, since {process.since}{_holding(process)}", process)
        for process in remains.earlier
        if process.holds(remains.log)
    )
    return first(found, "no process seen ran before the launch")


def _holding(process: Process) -> str:
    return f" and holds {', '.join(process.gpus)}" if process.gpus else ""


def ghost(remains: Remains) -> Finding:
    """Memory is taken, or the GPU works, without a process that can be seen."""
    if any(process.gpus for process in remains.processes):
        return excluded("whoever holds a GPU is seen")
    found = gpus.ask()
    if found is None:
        return unknown("nvidia-smi does not answer")
    if not found:
        return excluded("no NVIDIA driver answers here")
    busy = [gpu for gpu in found if gpu.is_busy]
    if not busy:
        return excluded("no GPU is busy")
    shown = ", ".join(str(gpu.index) for gpu in busy)
    if remains.unreadable:
        return unknown(f"GPU {shown} is busy; {remains.unreadable} processes cannot be read")
    return fits(
        f"GPU {shown} is busy, and no process holds one: another container, or a driver's ghost"
    )
