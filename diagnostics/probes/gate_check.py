"""`dflash-diag gate-check`: the interleavings of the start-up gate, by repro/gate_check.py."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from diagnostics.probes.schedule import Schedule, SearchVerdict
from diagnostics.render import json, junit, text
from diagnostics.reproducers import EXIT_CODES as CHILD_EXIT_CODES
from diagnostics.reproducers import Outcome, follow, reproducer_dir, said
from diagnostics.verdict import EXIT_CODES, Status, Verdict

CODES = {
    Outcome.REPRODUCED: (Status.PROBLEM, "gate-fails"),
    Outcome.ABSENT: (Status.OK, "gate-holds"),
    Outcome.CANNOT_TELL: (Status.UNKNOWN, "gate-unclear"),
}
PROGRAM = "gate_check.py"
REMEDY = "the schedule above shows it; --scenario {} runs that search alone"
Report = Mapping[str, Any]


@click.command("gate-check", epilog=EXIT_CODES)
@click.option("--scenario", multiple=True, metavar="NAME", help="only this; repeatable")
@click.option("--bug", multiple=True, metavar="NAME", help="of the planted bugs only this, shown")
@click.option("--quick", is_flag=True, help="2 drafters and 1 target only")
@click.option("--full", is_flag=True, help="with a prefetch thread as well, which takes minutes")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "--junit",
    "junit_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="write a JUnit report as well",
)
def gate_check(
    scenario: tuple[str, ...],
    bug: tuple[str, ...],
    quick: bool,
    full: bool,
    as_json: bool,
    junit_file: Path | None,
) -> None:
    """Prove that no thread works before every drafter is warm, and that start-up always ends.

    Runs the installed gate, channels and task group in all orders of a few threads: healthy, a
    drafter that raises, hangs or is slow in its warm-up, a stage that raises right behind the
    gate, SIGTERM at any moment. Then plants bugs, every one of which must be found.
    """
    if quick and full:
        raise click.UsageError("--quick and --full: one of them at a time")
    if junit_file is not None and not junit_file.parent.is_dir():
        raise click.UsageError(f"--junit {junit_file}: make its directory first")
    arguments = [word for name in scenario for word in ("--scenario", name)]
    arguments += [word for name in bug for word in ("--bug", name)]
    arguments += ["--quick"] * quick + ["--full"] * full
    verdict, report = probe(arguments, lambda line: click.echo(line, err=as_json))
    if junit_file is not None:
        junit.write(junit_file, junit.render(verdict, "gate-check", cases(report)))
    click.echo(json.render(verdict) if as_json else f"\n{text.render(verdict, evidence=False)}")
    sys.exit(verdict.exit_code)


def probe(
    arguments: Sequence[str], show: Callable[[str], None], quiet_s: float = 120.0
) -> tuple[Verdict, Report]:
    """Run the search with these arguments, show its lines as they come, judge its last one.

    One that shows nothing for `quiet_s`, or dies, is "could not check". Raises click.UsageError
    if it does not take the arguments.
    """
    lines: list[str] = []

    def hear(line: str) -> None:
        if lines:
            show(lines.pop())  # all but the last, which is for us
        lines.append(line)

    ended = follow(reproducer_dir() / PROGRAM, arguments, hear, quiet_s=quiet_s)
    if ended.code == 2:
        raise click.UsageError(ended.how().partition("error: ")[2])
    report = said("".join(lines))
    if ended.code not in CHILD_EXIT_CODES or "outcome" not in report:
        summary = f"the search did not end well: {ended.how()}"
        return Verdict(Status.UNKNOWN, "gate-not-searched", summary), {}
    return judge(report), report


def judge(report: Report) -> SearchVerdict:
    """One sentence and the schedules that fail, from the JSON line."""
    status, code = CODES[Outcome(report["outcome"])]
    rows = report["rows"]
    failing = [row["scenario"] for row in rows if row["failing"] and not row["bug"]]
    remedy = REMEDY.format(failing[0]) if failing else ""
    summary = f"{report['reason']}, in {report['seconds']:.0f} s"
    evidence = {_name(row): _counts(row) for row in rows}
    schedules = tuple(_schedule(row) for row in rows if row["schedule"])
    return SearchVerdict(status, code, summary, evidence, remedy, schedules)


def _schedule(row: Mapping[str, Any]) -> Schedule:
    return Schedule.of(row["what"] or _name(row), row["schedule"], planted=bool(row["bug"]))


def cases(report: Report) -> list[junit.Case]:
    """Every search as an experiment; a planted bug passes if it is found."""
    return [
        junit.Case("gate-check", _name(row), _passed(row), row["failure"] or _counts(row))
        for row in report.get("rows", ())
    ]


def _passed(row: Mapping[str, Any]) -> Outcome:
    if not row["bug"]:
        return Outcome(row["outcome"])
    return Outcome.ABSENT if row["failing"] else Outcome.CANNOT_TELL


def _name(row: Mapping[str, Any]) -> str:
    if row["bug"]:
        return f"bug {row['bug']}"
    return f"{row['scenario']} {row['size']}" + (" unreduced" if row["how"] == "unreduced" else "")


def _counts(row: Mapping[str, Any]) -> str:
    counts = f"{row['states']} states, {row['ended']} ends"
    if row["bug"]:
        return f"{counts}, " + (f"found: {row['failure']}" if row["failing"] else "not found")
    if not row["complete"]:
        return f"{counts}, not all: {row['unclear'] or 'cut short'}"
    bound = row["preemptions"]
    reach = "all there are" if bound is None else f"up to {bound} preemptions"
    return f"{counts}, {row['failing']} fail, {reach}"
