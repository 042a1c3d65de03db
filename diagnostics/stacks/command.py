"""`dflash-diag stacks`: what every thread of a process is doing, and who keeps whom waiting."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from diagnostics.render import json, text
from diagnostics.stacks import pyspy, run, target, tree
from diagnostics.stacks.states import Finding, classify
from diagnostics.stacks.target import NoTarget, Target
from diagnostics.stacks.threads import Frame
from diagnostics.stacks.verdict import by_guilt, judge
from diagnostics.verdict import EXIT_CODES, Status, Verdict

FOLDED = ("/torch/", "/threading.py", "/dflash/concurrency/", "/concurrent/futures/")
NATIVE_SHOWN = 12
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
        verdict, details = _look(find, native)
        if as_json:
            click.echo(json.render(verdict))
        else:
            click.echo("\n".join([text.render(verdict, evidence=False), *details]))
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


def _look(find: Callable[[], Target], native: bool) -> tuple[Verdict, list[str]]:
    """The verdict and the lines below it."""
    try:
        process = find()
    except NoTarget as error:
        return Verdict(Status.UNKNOWN, "no-process", str(error)), []
    if process.beats is not None and not process.beats.is_alive:
        return run.after_death(process.beats)
    loops = run.loop_lines(process.beats) if process.beats else []
    try:
        findings = [classify(thread) for thread in pyspy.sample(process.pid, native=native)]
    except pyspy.Refused as refusal:
        return _refused(process, refusal, loops)
    verdict = judge(findings)
    if process.beats is not None:
        verdict = run.with_loops(verdict, process.beats, findings)
    first = run.overdue(process.beats) if process.beats else []
    return verdict, [*loops, *_graph(findings), *_stacks(findings, first)]


def _refused(
    process: Target, refusal: pyspy.Refused, loops: list[str]
) -> tuple[Verdict, list[str]]:
    """The process's own dump, where it is a run of `dflash train`."""
    from dflash import faults

    own = faults.ask(process.pid, process.run) if process.run else ""
    remedy = refusal.remedy
    if not process.run:
        remedy += (
            " Or let the program dump itself: faulthandler.register(signal.SIGUSR1) at its start, "
            f"then kill -USR1 {process.pid}."
        )
    verdict = Verdict(Status.UNKNOWN, "no-stacks", str(refusal), remedy=remedy.strip())
    if process.beats is not None:
        verdict = run.with_loops(verdict, process.beats, [])
    lines = ["", "stacks as the process wrote them itself", own] if own else []
    return verdict, [*loops, *lines]


def _graph(findings: list[Finding]) -> list[str]:
    lines = tree.render(findings)
    return ["", "who waits for whom", *lines] if lines else []


def _stacks(findings: list[Finding], first: list[str]) -> Iterator[str]:
    yield from ("", "stacks, most telling first")
    for finding in sorted(by_guilt(findings), key=lambda f: str(f.thread) not in first):
        if finding.thread.frames:
            yield f"  {finding}  [{finding.thread.tid}]"
            yield from _folded(_of_interest(finding))


def _folded(frames: list[Frame]) -> Iterator[str]:
    """The frames, runs of library code as one line, but for the innermost."""
    hidden = 0
    for i, frame in enumerate(frames):
        if i and any(part in frame.path for part in FOLDED):
            hidden += 1
            continue
        if hidden:
            yield f"      ... {hidden} of the library"
            hidden = 0
        yield f"      {frame}"
    if hidden:
        yield f"      ... {hidden} of the library"


def _of_interest(finding: Finding) -> list[Frame]:
    """All Python frames, and the native ones above them: where the thread stands."""
    native = []
    for frame in finding.thread.frames:
        if not frame.is_native:
            break
        if not frame.function.startswith("0x"):
            native.append(frame)
    return [*native[:NATIVE_SHOWN], *finding.thread.python]
