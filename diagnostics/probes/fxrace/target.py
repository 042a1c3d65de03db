"""`--target`: the user's own step in the parked schedules, then under load."""

from collections.abc import Callable, Sequence

from diagnostics.probes.fxrace import table
from diagnostics.probes.fxrace.stress import Load
from diagnostics.verdict import Status, Verdict

CURES = (table.NO_CURE, table.SHIPPED)


def probe(
    target: str,
    cells: Sequence[str],
    load: Sequence[str],
    show: Callable[[str], None],
) -> Verdict:
    """Say which failures the step can meet, and which cure suffices, parked and under load.

    Args:
        target: `package.module:function`, a step or what returns one.
        cells, load: further options of repro/cells.py and repro/stress.py.
    """
    report = table.measure([*cells, "--target", target], show)
    loads = {}
    for cure in CURES:
        show("")
        loads[cure] = Load([*load, "--target", target, "--cure", cure], show).run()
        show(loads[cure].summary)
    parked = table.judge(report)
    summary = f"{target}, parked: {parked.summary}"
    evidence = {**parked.evidence}
    for cure, under_load in loads.items():
        summary += f"; under load: {under_load.summary}"
        evidence |= {f"load, {cure}, {name}": what for name, what in under_load.evidence.items()}
    remedies = [verdict.remedy for verdict in (parked, *loads.values()) if verdict.remedy]
    worst = _worst([parked.status, loads[table.NO_CURE].status])
    code = {Status.PROBLEM: "target-fails", Status.OK: "target-holds"}.get(worst, "target-unclear")
    return Verdict(worst, code, summary, evidence, "\n  ".join(remedies))


def _worst(statuses: Sequence[Status]) -> Status:
    order = (Status.PROBLEM, Status.UNKNOWN, Status.OK)
    return min(statuses, key=order.index)
