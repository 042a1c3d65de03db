"""All checks in their order, and what they come to together."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from diagnostics.preflight import devices, leftovers, machine, run
from diagnostics.preflight.line import Line, Seen, unknown
from diagnostics.verdict import Status, Verdict

Check = Callable[[Seen], Line | None]
# A check whose subject is absent, a port that nobody asked for, returns None.
CHECKS: tuple[Check, ...] = (
    leftovers.visibility,
    leftovers.gpu_holders,
    leftovers.zombie_leaders,
    leftovers.orphans,
    leftovers.deleted_outputs,
    leftovers.shared_memory,
    devices.gpu_memory,
    devices.device_numbers,
    devices.settings,
    machine.limits,
    machine.memory,
    machine.clock,
    machine.caches,
    machine.ports,
    machine.tmux,
)


def lines(seen: Seen, config: Path | None, progress: Callable[[str], None]) -> Iterator[Line]:
    """Every check's line, as soon as it is known; with a configuration, those of the run too."""
    for check in CHECKS if config is None else (*CHECKS, run.output_directory):
        if (line := _line_of(check, seen)) is not None:
            yield line
    if config is not None:
        progress("a child reads target and data, which takes torch")
        yield from run.inquire(config, seen, progress)


def _line_of(check: Check, seen: Seen) -> Line | None:
    try:
        return check(seen)
    except (OSError, psutil.Error) as refused:
        return unknown(check.__name__.replace("_", " "), f"could not be looked at: {refused}")


def judge(found: Sequence[Line]) -> Verdict:
    """A problem outweighs what is unknown, which outweighs all that is fine."""
    by_status = {status: [line for line in found if line.status is status] for status in Status}
    evidence = {line.name: str(line) for line in found}
    wrong, open_ = by_status[Status.PROBLEM], by_status[Status.UNKNOWN]
    if wrong:
        also = f"; unknown: {_names(open_)}" if open_ else ""
        summary = f"{len(wrong)} of {len(found)} checks: {_names(wrong)}{also}"
        return Verdict(Status.PROBLEM, "preflight-problems", summary, evidence)
    if open_:
        summary = f"nothing wrong was seen, but {len(open_)} of {len(found)} checks could not tell"
        return Verdict(Status.UNKNOWN, "preflight-unknown", f"{summary}: {_names(open_)}", evidence)
    return Verdict(Status.OK, "preflight-clean", f"all {len(found)} checks", evidence)


def _names(found: Sequence[Line]) -> str:
    return ", ".join(line.name for line in found)
