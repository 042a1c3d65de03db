"""`dflash-diag launch-check --canary`: the user's own launch, really run, with a canary in it.

The trainer is never started: a small program stands in its place, writes lines, and dies in each
way. Its log, and everything else that the launch writes, goes to a scratch directory; tmux has a
private server, with the `set` lines of the user's configuration. That the log's real directory is
missing or full is therefore not seen here: `launch-check` without --canary looks for that.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from diagnostics.launch import pool, table
from diagnostics.launch.deaths import DEATHS
from diagnostics.launch.losses import judged, losses
from diagnostics.launch.rewrite import Rewritten, rewrite
from diagnostics.launch.scene import LINES, Plan, Scene
from diagnostics.launch.shell import Source
from diagnostics.launch.stand_in import CannotRewrite
from diagnostics.launch.trial import Result, attempt, makes_sense
from diagnostics.redact import redact
from diagnostics.render import junit
from diagnostics.verdict import Status, Verdict

Show = Callable[[str], None]
TRIAL_S = 0.35
SLOW_TRIAL_S = 6.0  # torchrun imports torch
FEW = ("raises", "SIGKILL", "worker lives", "hang-up")  # for launchers that take seconds each


@dataclass(frozen=True)
class Job:
    """One death of the canary in a user's launch."""

    source: Source
    death: str


def probe(source: Source, *, show: Show) -> tuple[Verdict, list[junit.Case]]:
    """Let a canary die in the user's own launch, in each way, and see what is left.

    Where the launch cannot be run safely, it says what is in the way, and runs nothing.
    """
    try:
        with _signals_put_off(), tempfile.TemporaryDirectory(prefix="dflash-canary-") as name:
            rewritten = rewrite(source, Path(name), _plan(Path(name), ""))
    except CannotRewrite as error:
        return _refused(error, show), []
    if missing := [tool for tool in ("bash", "tmux") if _lacks(tool, rewritten)]:
        return Verdict(Status.UNKNOWN, "canary-not-run", f"{missing[0]} is not installed"), []
    show(f"a canary stands in for: {redact(rewritten.stands_in_for)}")
    if unbuffered := os.environ.get("PYTHONUNBUFFERED"):
        show(f"PYTHONUNBUFFERED={unbuffered} is set here: will it be where you launch?")
    try:
        results = _measure(source, rewritten, show)
    except pool.Broken as error:
        return Verdict(Status.UNKNOWN, "canary-not-run", f"a trial failed: {error}"), []
    return _judge(rewritten, results), [*_cases(rewritten, results)]


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """What is short is not cut off by Ctrl-C or SIGTERM: they are taken behind it."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _frame: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def _plan(folder: Path, code: str) -> Plan:
    return Plan(str(folder / "record"), LINES, "print", code)


def _lacks(tool: str, rewritten: Rewritten) -> bool:
    needed = tool == "bash" or rewritten.shape.session
    return needed and shutil.which(tool) is None


def _refused(error: CannotRewrite, show: Show) -> Verdict:
    reasons = [redact(reason) for reason in dict.fromkeys(error.reasons)]
    evidence = {f"{i}": reason for i, reason in enumerate(reasons, start=1)}
    summary = f"not run with a canary: {reasons[0]}"
    if len(reasons) > 1:
        summary = f"not run with a canary: {len(reasons)} things are in the way"
        for reason in reasons:
            show(reason)
    remedy = "Nothing was started. Name the launching line alone, or read it without --canary."
    return Verdict(Status.UNKNOWN, "canary-refused", summary, evidence, remedy)


def _measure(source: Source, rewritten: Rewritten, show: Show) -> dict[str, Result]:
    """Each death, shown in order as it comes. Raises pool.Broken."""
    possible = [
        death.name
        for death in DEATHS.values()
        if makes_sense(rewritten.shape, death) and not death.needs
    ]
    deaths = [name for name in possible if name in FEW] if rewritten.is_slow else possible
    # Launchers of several workers meet at a port.
    at_once, trial_s = (1, SLOW_TRIAL_S) if rewritten.is_slow else (2, TRIAL_S)
    left = timedelta(seconds=round(len(deaths) * trial_s / at_once))
    show(f"it dies in {len(deaths)} ways, {at_once} at a time: about {left}\n\n{table.EACH_HEAD}")
    jobs = [Job(source, death) for death in deaths]
    found: dict[str, Result] = {}
    results: dict[str, Result] = {}
    lines: list[str] = []
    for job, result in pool.results(jobs, run, at_once):
        found[job.death] = result
        while len(results) < len(deaths) and (name := deaths[len(results)]) in found:
            results[name] = found[name]
            lines.append(table.each(rewritten.shape, DEATHS[name], results[name]))
            show(lines[-1])
    show("\n".join(["", *table.each_legend(lines)]))
    return results


def run(job: Job) -> Result:
    """One death, in a scratch directory that is gone afterwards. Raises CannotRewrite."""
    death = DEATHS[job.death]
    with tempfile.TemporaryDirectory(prefix="dflash-canary-") as name:
        folder = Path(name)
        rewritten = rewrite(job.source, folder, _plan(folder, death.code))
        scene = Scene(folder, rewritten.shape, rewritten.log, _environment(folder))
        scene.pid_file = rewritten.pid_file
        return attempt(scene, rewritten.shape.line, Path.cwd(), death)


def _environment(folder: Path) -> dict[str, str]:
    """The user's own, with the private tmux in front, for the trial's own questions to it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TMUX")}
    return kept | {
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "TMPDIR": str(folder),  # torchrun leaves directories behind
        "HISTFILE": os.devnull,
        "TERM": "dumb",
        "PS1": "",
    }


def _judge(rewritten: Rewritten, results: Mapping[str, Result]) -> Verdict:
    shape = rewritten.shape
    lost = {name: losses(shape, DEATHS[name], result) for name, result in results.items()}
    lost = {name: what for name, what in lost.items() if what}
    unclear = [f"{name}: {r.unclear}" for name, r in results.items() if r.unclear]
    evidence = {name: ", ".join(what) for name, what in lost.items()}
    if all(not result.started for result in results.values()):
        said = redact(next(iter(results.values())).said)
        summary = f"this launch never starts its program: {said}"
        return Verdict(Status.PROBLEM, "canary-never-starts", summary, evidence)
    if lost:
        summary = f"something is lost in {len(lost)} of {len(results)} deaths of this launch"
        remedy = "dflash-diag launch-check, without --canary, says what to write instead."
        return Verdict(Status.PROBLEM, "canary-loses", summary, evidence, remedy)
    if unclear:
        return Verdict(Status.UNKNOWN, "canary-unclear", "; ".join(unclear))
    summary = f"nothing is lost in {len(results)} deaths of this launch"
    return Verdict(Status.OK, "canary-keeps", summary)


def _cases(rewritten: Rewritten, results: Mapping[str, Result]) -> Iterator[junit.Case]:
    for name, result in results.items():
        yield junit.Case("canary", name, *judged(rewritten.shape, DEATHS[name], result))
