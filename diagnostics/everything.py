"""`dflash-diag all`: every probe that applies here, side by side, and one table of verdicts."""

import concurrent.futures
import dataclasses
import json as jsonlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from diagnostics.render import json, junit
from diagnostics.reproducers import Outcome
from diagnostics.verdict import EXIT_CODES, ProbeExit, Status, Verdict

AT_ONCE = 2
LIMIT_S = 900.0
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, exists=True)


@dataclass(frozen=True)
class Probe:
    """A command of dflash-diag; without `words` it was not asked for, and `why` says how to."""

    name: str
    words: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Told:
    """What a probe said, how long it took, and what its JSON has besides the verdict."""

    probe: Probe
    verdict: Verdict
    seconds: float
    more: Mapping[str, Any] = field(default_factory=dict)


@click.command("all", epilog=EXIT_CODES)
@click.option("--quick", is_flag=True, help="the short form of those that have one")
@click.option("--config", type=EXISTING, metavar="run.toml", help="the run that is to start")
@click.option("--launch", type=EXISTING, metavar="SCRIPT", help="how it is launched")
@click.option("--run", type=EXISTING, metavar="DIR", help="a run's --output-dir: what is stuck")
@click.option("--manifest", type=EXISTING, metavar="FILE", help="of the dflash that is meant")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "--junit", "junit_file", type=FILE, metavar="FILE", help="write a JUnit report as well"
)
def everything(
    quick: bool,
    config: Path | None,
    launch: Path | None,
    run: Path | None,
    manifest: Path | None,
    as_json: bool,
    junit_file: Path | None,
) -> None:
    """Run every probe that applies here, and show one table of what they found.

    What needs to be told something (a launch, a run, a manifest) runs when it is; the table says
    what did not run, and how to ask for it.
    """
    asked, left_out = chosen(quick, config, launch, run, manifest)

    def show(line: str) -> None:
        click.echo(line, err=as_json)

    told = run_all(asked, show)
    verdict = summed_up(told, left_out)
    if as_json:
        click.echo(json.render(verdict))
    else:
        click.echo(
            "\n" + "\n".join(_table(told, left_out)) + f"\n\n{verdict.status}: {verdict.summary}"
        )
    if junit_file:
        junit.write(junit_file, junit.render(verdict, "all", [_case(one) for one in told]))
    sys.exit(verdict.exit_code)


def chosen(
    quick: bool, config: Path | None, launch: Path | None, run: Path | None, manifest: Path | None
) -> tuple[list[Probe], list[Probe]]:
    """The probes that apply, and those that would have to be told something."""
    probes = list(_probes(quick, config, launch, run, manifest))
    return [p for p in probes if p.words], [p for p in probes if not p.words]


def _probes(
    quick: bool, config: Path | None, launch: Path | None, run: Path | None, manifest: Path | None
) -> Iterator[Probe]:
    short = ("--quick",) if quick else ()
    yield Probe("env", ("env",))
    yield Probe("preflight", ("preflight", *(("--config", str(config)) if config else ())))
    yield Probe("fxrace", ("fxrace", *short))
    yield Probe("gate-check", ("gate-check", *short))
    yield _asked("launch-check", launch, ("launch-check", str(launch)), "--launch SCRIPT")
    yield _asked("stacks", run, ("stacks", "--run", str(run)), "--run DIR")
    words = ("deploy-check", "verify", str(manifest), "dflash")
    yield _asked("deploy-check", manifest, words, "--manifest FILE")


def _asked(name: str, given: Path | None, words: tuple[str, ...], option: str) -> Probe:
    return Probe(name, words) if given else Probe(name, why=f"not run: add {option}")


def run_all(probes: list[Probe], show: Callable[[str], None]) -> list[Told]:
    """Each in a process of its own, `AT_ONCE` at a time; in the order of the list."""
    started_s = time.monotonic()
    done: dict[str, Told] = {}
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for future in concurrent.futures.as_completed([pool.submit(ask, p) for p in probes]):
            told = future.result()
            done[told.probe.name] = told
            show(
                f"{len(done)} of {len(probes)}, {time.monotonic() - started_s:.0f} s: "
                f"{told.probe.name} {told.verdict.status}"
            )
    return [done[probe.name] for probe in probes]


def ask(probe: Probe) -> Told:
    """Run one; whatever keeps it from answering is a verdict of its own."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "diagnostics", *probe.words, "--json"]
    more: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        verdict, more = _split(jsonlib.loads(done.stdout))
    except subprocess.TimeoutExpired:
        verdict = Verdict(Status.UNKNOWN, "no-answer", f"no answer within {LIMIT_S:g} s")
    except (ValueError, KeyError, TypeError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        verdict = Verdict(
            Status.UNKNOWN, "no-answer", f"exit status {done.returncode}, and it said: {said}"
        )
    return Told(probe, verdict, time.monotonic() - started_s, more)


def _split(read: dict[str, Any]) -> tuple[Verdict, dict[str, Any]]:
    """The verdict, and the rest."""
    names = {field.name for field in dataclasses.fields(Verdict)}
    kept = {name: value for name, value in read.items() if name in names}
    more = {name: value for name, value in read.items() if name not in names}
    return Verdict(**{**kept, "status": Status(read["status"])}), more


def summed_up(told: list[Told], left_out: list[Probe]) -> Verdict:
    """The worst of them: a problem, then what could not be checked."""
    by_status = {
        status: [one.probe.name for one in told if one.verdict.status is status]
        for status in Status
    }
    evidence = {one.probe.name: f"{one.verdict.status}: {one.verdict.summary}" for one in told}
    evidence |= {probe.name: probe.why for probe in left_out}
    rest = f"; not run: {', '.join(p.name for p in left_out)}" if left_out else ""
    for status, code, words in (
        (Status.PROBLEM, "something-found", "found something"),
        (Status.UNKNOWN, "something-unchecked", "could not check"),
    ):
        if names := by_status[status]:
            return Verdict(status, code, f"{', '.join(names)} {words}{rest}", evidence)
    return Verdict(Status.OK, "nothing-found", f"{len(told)} probes found nothing{rest}", evidence)


def _table(told: list[Told], left_out: list[Probe]) -> Iterator[str]:
    width = max(len(probe.name) for probe in [*left_out, *(one.probe for one in told)])
    for one in told:
        head = f"{one.probe.name:<{width}}  {one.verdict.status:<8}{one.seconds:6.1f} s"
        yield f"{head}  {one.verdict.summary}"
        if one.verdict.status is not Status.OK and one.verdict.remedy:
            yield f"{'':<{width}}  {'':8}{'':8}  {one.verdict.remedy}"
    for probe in left_out:
        yield f"{probe.name:<{width}}  {'-':<8}{'':8}  {probe.why}"


def _case(told: Told) -> junit.Case:
    outcomes = {
        ProbeExit.OK: Outcome.ABSENT,
        ProbeExit.PROBLEM: Outcome.REPRODUCED,
        ProbeExit.UNKNOWN: Outcome.CANNOT_TELL,
    }
    outcome = outcomes[told.verdict.exit_code]
    return junit.Case("dflash-diag", told.probe.name, outcome, told.verdict.summary)
