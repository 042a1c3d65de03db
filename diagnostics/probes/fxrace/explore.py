"""All interleavings of two threads, searched by repro/explore.py: a bounded proof, not a sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diagnostics.probes.schedule import Schedule, SearchVerdict
from diagnostics.reproducers import EXIT_CODES, Outcome, follow, reproducer_dir, said
from diagnostics.verdict import Status, Verdict

NO_CURE = "none"
CODES = {
    Outcome.REPRODUCED: (Status.PROBLEM, "interleavings-fail"),
    Outcome.ABSENT: (Status.OK, "interleavings-hold"),
    Outcome.CANNOT_TELL: (Status.UNKNOWN, "interleavings-unclear"),
}


def probe(arguments: Sequence[str], show: Callable[[str], None], quiet_s: float = 300.0) -> Verdict:
    """Run repro/explore.py with these arguments, show its lines as they come, judge its last one.

    A search that shows no row for `quiet_s`, or dies, is "could not check".
    """
    lines: list[str] = []

    def hear(line: str) -> None:
        if lines:
            show(lines.pop())  # all but the last, which is for us
        lines.append(line)

    ended = follow(reproducer_dir() / "explore.py", arguments, hear, quiet_s=quiet_s)
    report = said("".join(lines))
    if ended.code not in EXIT_CODES or "outcome" not in report:
        summary = f"the search did not end well: {ended.how()}"
        return Verdict(Status.UNKNOWN, "interleavings-not-searched", summary)
    return judge(report)


def judge(report: Mapping[str, Any]) -> SearchVerdict:
    """One sentence and the schedules that fail, from the JSON line of a search or of a replay."""
    status, code = CODES[Outcome(report["outcome"])]
    rows = report.get("rows", [])
    summary = f"torch {report['torch']}, two threads one at a time: {report['reason']}"
    evidence = {f"{row['scenario']} {row['cure']}": _counts(row) for row in rows}
    failing = [row["scenario"] for row in rows if row["cure"] == NO_CURE and row["bad"]]
    remedy = "\n  ".join(_holding(scenario, rows) for scenario in failing)
    schedules = tuple(_schedule(row) for row in rows if row["schedule"])
    return SearchVerdict(status, code, summary, evidence, remedy, schedules)


def _schedule(row: Mapping[str, Any]) -> Schedule:
    cure = "no cure" if row["cure"] == NO_CURE else row["cure"]
    roles = ", ".join(f"{name} {role}" for name, role in row["roles"].items())
    return Schedule.of(f"{row['scenario']}, {cure} ({roles})", row["schedule"], row["roles"])


def _counts(row: Mapping[str, Any]) -> str:
    counts = f"{row['bad']} of {row['schedules']} schedules fail"
    if row["unclear"] or not row["complete"]:
        return f"{counts}, not all were run" + (f": {row['unclear']}" if row["unclear"] else "")
    bound = row["preemptions"]
    return f"{counts}, " + ("all there are" if bound is None else f"up to {bound} preemptions")


def _holding(scenario: str, rows: Sequence[Mapping[str, Any]]) -> str:
    here = [row for row in rows if row["scenario"] == scenario and row["cure"] != NO_CURE]
    cures = [row["cure"] for row in here if row["outcome"] == Outcome.ABSENT]
    return f"{scenario}: no schedule fails with {', '.join(cures) or 'any cure that was tried'}"
