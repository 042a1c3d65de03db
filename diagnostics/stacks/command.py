"""`dflash-diag stacks`: what every thread of a process is doing, and who keeps whom waiting."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from diagnostics.render import json, text
from diagnostics.stacks import pyspy, run, seen, target
from diagnostics.stacks.seen import Section, StacksVerdict
from diagnostics.stacks.states import classify
from diagnostics.stacks.target import NoTarget, Target
from diagnostics.stacks.verdict import judge
from diagnostics.verdict import EXIT_CODES, Status, Verdict

WATCH_S = 5.0


@click.command("stacks", epilog=EXIT_CODES)
@click.argument("pid", type=int, required=False)
@click.option("--name", metavar="PATTERN", help="the one process whose command line has it")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="the run with this --output-dir; after its death, what it did last",
)
@click.option("--watch", is_flag=True, help=f"look again every {WATCH_S:g} s, until Ctrl-C")
@click.option("--native", is_flag=True, help="C frames as well; stops the process for a moment")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def stacks(
    pid: int | None,
    name: str | None,
    run_dir: Path | None,
    watch: bool,
    native: bool,
    as_json: bool,
) -> None:
    """Say what every thread of a Python process is doing, and who keeps whom waiting.

    Looks twice, without stopping the process. Of a run of `dflash train` it also shows what each
    loop works on, since when, and, after its death, what happened last.
    """
    find = _finder(pid, name, run_dir)
    while True:
        verdict = _look(find, native)
        if as_json:
            click.echo(json.render(verdict))
        else:
            click.echo("\n".join([text.render(verdict, evidence=False), *seen.render(verdict)]))
        if not watch:
            sys.exit(verdict.exit_code)
        time.sleep(WATCH_S)
        click.echo()


def _finder(pid: int | None, name: str | None, run_dir: Path | None) -> Callable[[], Target]:
    if sum(asked is not None for asked in (pid, name, run_dir)) != 1:
        raise click.UsageError("give one of PID, --name PATTERN and --run DIR")
    if pid is not None:
        return lambda: target.of_pid(pid)
    if name is not None:
        return lambda: target.of_name(name)
    assert run_dir is not None
    return lambda: target.of_run(run_dir)


def _look(find: Callable[[], Target], native: bool) -> StacksVerdict:
    """The verdict and all that was seen."""
    try:
        process = find()
    except NoTarget as error:
        return StacksVerdict(Status.UNKNOWN, "no-process", str(error))
    if process.beats is not None and not process.beats.is_alive:
        return run.after_death(process.beats)
    loops = [run.loop_lines(process.beats)] if process.beats else []
    try:
        findings = [classify(thread) for thread in pyspy.sample(process.pid, native=native)]
    except pyspy.Refused as refusal:
        return _refused(process, refusal, loops)
    verdict = judge(findings)
    if process.beats is not None:
        verdict = run.with_loops(verdict, process.beats, findings)
    first = run.overdue(process.beats) if process.beats else []
    return seen.with_details(verdict, findings, loops, first)


def _refused(process: Target, refusal: pyspy.Refused, loops: list[Section]) -> StacksVerdict:
    """The process's own dump, where it is a run of `dflash train`."""
    from dflash import faults

    own = faults.ask(process.pid, process.run) if process.run else ""
    remedy = refusal.remedy
    if not process.run:
        remedy += (
            " Or let the program dump itself: signal.signal(signal.SIGUSR1, lambda *_: "
            f"faulthandler.dump_traceback()) at its start, then kill -USR1 {process.pid}. Not "
            "faulthandler.register: a program whose threads go on can crash of it."
        )
    verdict = Verdict(Status.UNKNOWN, "no-stacks", str(refusal), remedy=remedy.strip())
    if process.beats is not None:
        verdict = run.with_loops(verdict, process.beats, [])
    title = "stacks as the process wrote them itself"
    dump = [Section(title, tuple(own.splitlines()))] if own else []
    return seen.with_details(verdict, sections=[*loops, *dump])
