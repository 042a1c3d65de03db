"""`--target`: the user's own step in the parked schedules, then under load."""

from collections.abc import Callable, Sequence

from diagnostics.probes.fxrace import table
from diagnostics.probes.fxrace.stress import Load
from diagnostics.verdict import Status, Verdict, worst

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
    parked, bare, cured = table.judge(report), loads[table.NO_CURE], loads[table.SHIPPED]
    met = report.reproduced()
    summary = f"{target}, parked: {_met(met, parked)}; under load: {bare.summary}"
    evidence = {**parked.evidence}
    for cure, under_load in loads.items():
        evidence |= {f"load, {cure}, {name}": what for name, what in under_load.evidence.items()}
    status = worst([parked.status, bare.status])
    code = {Status.PROBLEM: "target-fails", Status.OK: "target-holds"}.get(status, "target-unclear")
    remedy = f"{_suffices(report, met)}; under load with shipped: {cured.summary}"
    return Verdict(status, code, summary, evidence, remedy)


def _met(met: Sequence[str], parked: Verdict) -> str:
    return f"it can meet {', '.join(met)}" if met else parked.summary


def _suffices(report: table.Report, met: Sequence[str]) -> str:
    """The cures under which none of these happened, parked."""
    holding = [set(report.holding(code)) for code in met]
    enough = sorted(set.intersection(*holding)) if holding else []
    if not met:
        return "nothing to cure was seen"
    return f"against all of these suffices, parked: {', '.join(enough) or 'nothing that was tried'}"
