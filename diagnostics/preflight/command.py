"""The options of `dflash-diag preflight`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diagnostics.render import json, junit
from diagnostics.reproducers import Outcome
from diagnostics.verdict import EXIT_CODES, Status, Verdict

if TYPE_CHECKING:
    from diagnostics.preflight.line import Line, Seen

FILE = click.Path(path_type=Path, dir_okay=False)
NAME_WIDTH = 16
OUTCOMES = {
    Status.OK: Outcome.ABSENT,
    Status.PROBLEM: Outcome.REPRODUCED,
    Status.UNKNOWN: Outcome.CANNOT_TELL,
}


@click.command("preflight", epilog=EXIT_CODES)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="the run.toml of the run that is to start: look at what it needs as well",
)
@click.option(
    "--port", "ports", type=click.IntRange(1, 65535), multiple=True, help="must be free; repeatable"
)
@click.option("--session", metavar="NAME", help="a tmux session of this name is to be made")
@click.option("--fix", is_flag=True, help="offer to end leftovers, one question for each process")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--junit", "report", type=FILE, metavar="FILE", help="write a JUnit report as well")
def preflight(
    config: Path | None,
    ports: tuple[int, ...],
    session: str | None,
    fix: bool,
    as_json: bool,
    report: Path | None,
) -> None:
    """Before a run: is anything left of an earlier one, and is there what the new one needs?

    Looks for processes that hold GPUs, dead ones with living threads, orphaned workers, deleted
    logs, shared memory that nobody maps, GPU memory in use; settings, limits, clock, compile cache
    and ports. With --config also: output directory, room for the checkpoints, data, target.
    Ends and deletes nothing, except, with --fix, the processes that you say yes to.
    """
    from diagnostics.preflight import checks

    if fix and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("--fix asks before it ends a process: it needs a terminal")
    found = _look(config, ports, session, as_json)
    if fix and _fixed(found):
        click.echo("\nand now:", err=as_json)
        found = _look(config, ports, session, as_json)
    verdict = checks.judge(found)
    if report is not None:
        cases = [
            junit.Case("dflash-diag preflight", line.name, OUTCOMES[line.status], str(line))
            for line in found
        ]
        junit.write(report, junit.render(verdict, "preflight", cases))
    click.echo(json.render(verdict) if as_json else f"\n{_summary(verdict)}")
    sys.exit(verdict.exit_code)


def _look(
    config: Path | None, ports: tuple[int, ...], session: str | None, as_json: bool
) -> list[Line]:
    """Every line, shown as it comes unless the answer is to be JSON."""
    from diagnostics.preflight import checks

    found = []
    for line in checks.lines(_seen(config, ports, session), config, _progress):
        found.append(line)
        if not as_json:
            click.echo(_rendered(line))
    return found


def _seen(config: Path | None, ports: tuple[int, ...], session: str | None) -> Seen:
    from dflash.errors import ConfigError
    from diagnostics import processes
    from diagnostics.preflight.line import Seen
    from diagnostics.preflight.run import open_run

    try:
        run = open_run(config) if config is not None else None
    except ConfigError as error:
        raise click.UsageError(f"{error}\n{error.remedy}") from error
    return Seen(processes.look(), run, ports=ports, session=session)


def _progress(what: str) -> None:
    click.echo(f"... {what}", err=True)


def _rendered(line: Line) -> str:
    width = max(map(len, Status))
    told = [f"{line.status:<{width}}  {line.name:<{NAME_WIDTH}}  {line.said}"]
    indent = " " * (width + NAME_WIDTH + 4)
    told += [f"{indent}{detail}" for detail in line.details]
    told += [f"{indent}-> {line.remedy}"] if line.remedy else []
    return "\n".join(told)


def _summary(verdict: Verdict) -> str:
    return f"{verdict.status}: {verdict.summary}"


def _fixed(found: list[Line]) -> int:
    from diagnostics.preflight import fix

    return fix.offer(
        found,
        ask=lambda question: click.confirm(question, err=True),
        say=lambda text: click.echo(text, err=True),
    )
