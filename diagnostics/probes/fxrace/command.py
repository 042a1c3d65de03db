"""The options of `dflash-diag fxrace`, and which part of it answers them."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from diagnostics.probes.fxrace import explore, log, stress, table, target, versions
from diagnostics.probes.fxrace.environments import Workshop
from diagnostics.render import json, junit, text
from diagnostics.reproducers import Outcome, cures, reproducers
from diagnostics.verdict import EXIT_CODES, Status, Verdict

FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; names as there."""

    mode: tuple[str, ...]
    cure: tuple[str, ...]
    quick: bool
    full: bool
    device: str
    explore: bool
    save: Path | None
    replay: Path | None
    stress: bool
    seconds: float
    drafters: int
    targets: int
    target: str | None
    windows: bool
    torch: str | None
    bisect: bool
    python: str
    yes: bool
    log: Path | None
    as_json: bool
    junit: Path | None

    def show(self, line: str) -> None:
        """Progress: on standard output, or beside it where that is JSON."""
        click.echo(line, err=self.as_json)

    def cells(self) -> Iterator[str]:
        """The options of repro/cells.py; `none` always runs: no cure can be judged without."""
        codes, chosen = self.mode, self.cure
        if self.quick:
            codes, chosen = ("DF001",), (table.SHIPPED,)
        elif self.bisect:
            chosen = (table.NO_CURE,)
        elif self.torch and not chosen:
            chosen = (table.SHIPPED,)
        for code in codes:
            yield from ("--code", code)
        for cure in dict.fromkeys((table.NO_CURE, *chosen)) if chosen else ():
            yield from ("--cure", cure)
        if self.full:
            yield "--full"
        yield from ("--device", self.device, "--at-once", str(max(2, (os.cpu_count() or 2) // 2)))

    def load(self) -> Iterator[str]:
        """The options of repro/stress.py but for the cure."""
        yield from ("--seconds", f"{self.seconds:g}", "--device", self.device)
        yield from ("--drafters", str(self.drafters), "--targets", str(self.targets))
        if self.windows:
            yield "--windows"

    def search(self) -> Iterator[str]:
        """The options of repro/explore.py."""
        if self.replay is not None:
            yield from ("--replay", str(self.replay))
        if self.save is not None:
            yield from ("--save", str(self.save))
        for cure in self.cure:
            yield from ("--cure", cure)


Answer = tuple[Verdict, list[junit.Case]]


@click.command("fxrace", epilog=EXIT_CODES)
@click.option("--mode", multiple=True, metavar="DFNNN", help="only this failure; repeatable")
@click.option("--cure", multiple=True, metavar="NAME", help="only this cure; repeatable")
@click.option("--quick", is_flag=True, help="the flag race alone, without and with its cure")
@click.option("--full", is_flag=True, help="every cure at every moment")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--explore", is_flag=True, help="search all interleavings of two threads")
@click.option("--save", type=FILE, metavar="FILE", help="keep the simplest bad schedule it finds")
@click.option("--replay", type=FILE, metavar="FILE", help="run a schedule kept by --save")
@click.option("--stress", is_flag=True, help="a realistic load instead of parked threads")
@click.option("--target", metavar="PKG.MODULE:FUNCTION", help="your own step: parked, then loaded")
@click.option("--seconds", type=click.FloatRange(min=1), default=30.0, help="of --stress, --target")
@click.option(
    "--drafters", type=click.IntRange(1), default=3, help="threads that compile under load"
)
@click.option("--targets", type=click.IntRange(0), default=1, help="eager threads under load")
@click.option("--windows", is_flag=True, help="under load, show each FX trace as it closes")
@click.option("--torch", metavar="V,V", help="measure these versions, each in its own environment")
@click.option("--bisect", is_flag=True, help="the first version in which each --mode is gone")
@click.option("--python", default=sys.executable, help="interpreter of the --torch environments")
@click.option("--yes", is_flag=True, help="download what --torch needs without asking")
@click.option("--log", type=FILE, metavar="FILE", help="which of these failures a log shows")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--junit", type=FILE, metavar="FILE", help="write a JUnit report as well")
def fxrace(**options: Any) -> None:
    """Reproduce what goes wrong when threads use torch.compile at the same time.

    Runs the reproducers without a cure and with the cures that matter (--full: all of them) on
    the installed torch, and shows the table row by row, with the meaning of its words.
    """
    request = Request(**options)
    answer = _chosen(request)
    _check_names(request)
    try:
        verdict, cases = answer(request)
    except RuntimeError as error:
        verdict, cases = Verdict(Status.UNKNOWN, "reproducers-did-not-run", str(error)), []
    if request.junit is not None:
        junit.write(request.junit, junit.render(verdict, "fxrace", cases))
    rows = (_table, _explore, _target, _versions)  # which showed their evidence as it came
    shown_already = answer in rows and not request.bisect
    rendered = text.render(verdict, evidence=not shown_already)
    click.echo(json.render(verdict) if request.as_json else f"\n{rendered}")
    sys.exit(verdict.exit_code)


def _chosen(request: Request) -> Callable[[Request], Answer]:
    """Raises click.UsageError if the options name more than one thing to do."""
    asked: dict[str, tuple[object, Callable[[Request], Answer]]] = {
        "--log": (request.log, _log),
        "--explore": (request.explore, _explore),
        "--replay": (request.replay, _explore),
        "--stress": (request.stress, _stress),
        "--target": (request.target, _target),
        "--bisect": (request.bisect, _versions),
        "--torch": (request.torch and not request.bisect, _versions),
    }
    names = [name for name, (value, _) in asked.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)}: one of them at a time")
    return asked[names[0]][1] if names else _table


def _check_names(request: Request) -> None:
    if request.junit is not None and not request.junit.parent.is_dir():
        raise click.UsageError(f"--junit {request.junit}: make its directory first")
    for option, given, known in (
        ("--mode", request.mode, [*reproducers(), table.COST]),
        ("--cure", request.cure, cures()),
    ):
        if unknown := sorted(set(given) - set(known)):
            raise click.UsageError(f"{option} {unknown[0]}: choose from {', '.join(known)}")


def _table(request: Request) -> Answer:
    report = table.measure([*request.cells()], request.show)
    return table.judge(report), [_case(report, cell) for cell in report.cells]


def _case(report: table.Report, cell: table.Cell) -> junit.Case:
    """A masked failure is neither a pass nor nothing to cure."""
    word = report.word(cell.code, cell.cure, cell.when)
    outcome = {"-": None, "mask": Outcome.CANNOT_TELL}.get(word, cell.outcome)
    return junit.Case(f"{cell.cure}/{cell.when}", cell.code, outcome, cell.reason)


def _log(request: Request) -> Answer:
    assert request.log is not None
    return log.probe(request.log), []


def _explore(request: Request) -> Answer:
    return explore.probe([*request.search()], request.show), []


def _stress(request: Request) -> Answer:
    if len(request.cure) > 1:
        raise click.UsageError("--stress runs under one --cure at a time")
    cure = request.cure[0] if request.cure else table.NO_CURE
    return stress.Load([*request.load(), "--cure", cure], request.show).run(), []


def _target(request: Request) -> Answer:
    assert request.target is not None
    cells, load = [*request.cells()], [*request.load()]
    return target.probe(request.target, cells, load, request.show), []


def _versions(request: Request) -> Answer:
    measured = versions.Versions(
        Workshop(request.python, request.show), [*request.cells()], request.show
    )
    names = versions.parse(request.torch) if request.torch else measured.stable()
    measured.survey(names)
    question = measured.to_ask_for()
    if question and not versions.ask(request.yes)(question):
        return versions.refused(question), []
    if request.bisect:
        codes = request.mode or ("DF001",)
        return versions.bisect(measured, names, codes), []
    return versions.compare(measured, names), []
