"""Who keeps a GPU busy, though the launch has failed."""

import re
import shutil
import subprocess

from diagnostics.launch.finding import Finding, excluded, first, fits, unknown
from diagnostics.launch.remains import Process, Remains

ANSWER_S = 15.0
BUSY_MIB = 500  # a GPU that nobody uses has less


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
    if shutil.which("nvidia-smi") is None:
        return excluded("no nvidia-smi here")
    if any(process.gpus for process in remains.processes):
        return excluded("whoever holds a GPU is seen")
    query = [
        "nvidia-smi",
        "--query-gpu=index,memory.used,utilization.gpu",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return unknown("nvidia-smi does not answer")
    busy = [
        numbers[0] for line in answer.stdout.splitlines() if _is_busy(numbers := _numbers(line))
    ]
    if not busy:
        return excluded("no GPU is busy")
    shown = ", ".join(map(str, busy))
    if remains.unreadable:
        return unknown(f"GPU {shown} is busy; {remains.unreadable} processes cannot be read")
    return fits(
        f"GPU {shown} is busy, and no process holds one: another container, or a driver's ghost"
    )


def _numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def _is_busy(numbers: list[int]) -> bool:
    return len(numbers) == 3 and (numbers[1] > BUSY_MIB or numbers[2] > 0)
