"""Search all interleavings of the real start-up gate, channels and task group, on stages in small.

    python repro/gate_check.py
    python repro/gate_check.py --scenario hangs --bug missing-notify

The scenarios of gate_scenarios.py with 2 drafters and 1 target: all interleavings, except where a
limit or a signal may come at any moment, which multiplies them; there, and with a prefetch thread
as well, and with 3 drafters and 2 targets, those with few preemptions (`--quick`: 2 drafters and 1
target alone; `--full`: all interleavings of 2 and 1 and a prefetch thread in every scenario, and at
most 2 preemptions for 3 and 2, which takes the better part of an hour). Each row says which.

Then two controls. The same search without the reductions, on less, must reach the same ends. And
the bugs of gate_bugs.py, planted one at a time, must all be found. The simplest schedule that fails
is shown: of a scenario, else of the bugs named by `--bug`, else of the first.

What is proved is bounded: these stages, so many threads and micro-batches, the points of
gate_model.py, and time that passes as it says there. Exit code: 10 some schedule fails, 0 none does
and every search was complete and every bug found, 125 cannot tell. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from children import Child
from gate_bugs import BUGS
from gate_scenarios import SCENARIOS, Size
from gate_trials import prepared
from states import Reached, Search
from timeline import as_data, steps_in_lanes
from turns import Unclear

EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125}
SMALL, PREFETCHING, LARGE = Size(2, 1, 0, 2), Size(2, 1, 1, 2), Size(3, 2, 0, 3)
SMALLEST, FOR_BUGS = Size(1, 1, 0, 1), Size(2, 1, 0, 1)
REDUCED, UNREDUCED, PLANTED = "reduced", "unreduced", "planted"
LARGE_SCENARIOS = ("healthy", "raises", "hangs")
PREFETCHERS = "prefetch-raises"
SMALLEST_SCENARIOS = ("slow", "target-raises")
# Preemptions where all interleavings would take minutes: a signal, or a limit, at any moment.
FEW = {"slow": 1, "stop": 1, "stop-hangs": 1}
PREFETCHING_BOUND, LARGE_BOUND, LARGE_BOUND_FULL, BUG_BOUND = 0, 0, 2, 2
PROGRESS_S = 10.0
HEADER = f"{'search':<30}{'states':>8}{'ends':>7}{'s':>7}  searched"


@dataclass(frozen=True)
class Job:
    """One search: `how` is without a control, or as one of the two."""

    scenario: str
    size: Size
    bound: int | None = None
    how: str = REDUCED
    bug: str = ""

    def __str__(self) -> str:
        """As it stands in the table."""
        if self.bug:
            return f"bug: {self.bug}"
        return f"{self.scenario} {self.size}" + (" unreduced" if self.how == UNREDUCED else "")

    def search(self, bound: int | None, progress: Callable[[Reached], None]) -> Reached:
        """Raises nothing but `Unclear`."""
        exact = self.how == REDUCED
        bug = BUGS[self.bug] if self.bug else None
        with prepared(
            self.scenario,
            self.size,
            atomic=self.how != UNREDUCED,
            skips_vain=exact,
            bug=bug,
        ) as fresh:
            return Search(
                fresh, preemptions=bound, reduce=exact, shortest=bool(bug), progress=progress
            ).run()


@dataclass(frozen=True)
class Row:
    """A search that has ended."""

    job: Job
    reached: Reached
    bound: int | None
    seconds: float

    @property
    def outcome(self) -> str:
        if self.reached.failing:
            return "reproduced"
        return "absent" if self.reached.complete else "cannot tell"

    @property
    def searched(self) -> str:
        if self.job.bug:
            return "found" if self.reached.failing else "NOT FOUND"
        if self.reached.failing:
            return f"{self.reached.failing} FAIL"
        if not self.reached.complete:
            return f"not exhaustive {self.reached.unclear}".rstrip()
        return "exhaustive" if self.bound is None else f"to {_times(self.bound)}"

    def text(self) -> str:
        counts = f"{self.reached.states:>8}{self.reached.ended:>7}{self.seconds:>7.1f}"
        return f"{self.job!s:<30}{counts}  {self.searched}"

    def summary(self) -> dict[str, Any]:
        """The row in the JSON line."""
        reached, simplest = self.reached, self.reached.simplest
        return {
            **{"scenario": self.job.scenario, "size": str(self.job.size), "how": self.job.how},
            **{"bug": self.job.bug, "what": BUGS[self.job.bug].what if self.job.bug else ""},
            **{"outcome": self.outcome, "preemptions": self.bound},
            **{"states": reached.states, "runs": reached.runs, "ended": reached.ended},
            **{"failing": reached.failing, "complete": reached.complete},
            **{"unclear": reached.unclear, "seconds": self.seconds},
            "failure": simplest.failure if simplest else None,
            "schedule": as_data(simplest),
            "ends": sorted(reached.outcomes),
        }


def searched(job: Job, cpu: int, show: Callable[[str], None]) -> Row:
    """Search in this process: on one CPU, where handing over the turn costs a tenth."""
    os.sched_setaffinity(0, {cpu})
    started_s = told_s = time.monotonic()

    def progress(reached: Reached) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            show(f"  ... {job}: {reached.states} states after {told_s - started_s:.0f} s")

    bound, reached = job.bound, Reached()
    for bound in range(job.bound + 1) if job.bug and job.bound is not None else (job.bound,):
        reached = job.search(bound, progress)
        if reached.failing or not reached.complete:
            break
    return Row(job, reached, bound, round(time.monotonic() - started_s, 2))


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """What is searched, the controls last."""
    chosen, full = arguments.scenario or [*SCENARIOS], arguments.full
    for scenario in chosen:
        if scenario != PREFETCHERS:
            yield Job(scenario, SMALL, None if full else FEW.get(scenario))
        if not arguments.quick and (full or scenario == PREFETCHERS):
            yield Job(scenario, PREFETCHING, None if full else PREFETCHING_BOUND)
    if not arguments.quick:
        bound = LARGE_BOUND_FULL if full else LARGE_BOUND
        yield from (Job(s, LARGE, bound) for s in LARGE_SCENARIOS if s in chosen)
    if not arguments.scenario:
        for scenario in SMALLEST_SCENARIOS:
            yield Job(scenario, SMALLEST)
            yield Job(scenario, SMALLEST, how=UNREDUCED)
    for name in arguments.bug or ([] if arguments.scenario else BUGS):
        yield Job(BUGS[name].scenario, FOR_BUGS, BUG_BOUND, PLANTED, name)


def rows(todo: Sequence[Job], timeout_s: float, show: Callable[[str], None]) -> Iterator[Row]:
    """One after another as they end in order, a process for each CPU at a time."""
    cpus = deque(sorted(os.sched_getaffinity(0)))
    waiting, running = deque(todo), deque[tuple[Job, int, Child]]()
    while waiting or running:
        while waiting and cpus:
            job, cpu = waiting.popleft(), cpus.popleft()
            running.append((job, cpu, Child(partial(searched, job, cpu, show), timeout_s)))
        job, cpu, child = running.popleft()
        try:
            yield child.answer()
        except Unclear as unclear:
            yield Row(job, Reached(unclear=str(unclear)), job.bound, timeout_s)
        cpus.append(cpu)


def check(arguments: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Print the rows and the simplest failing schedule; return the JSON line."""
    started_s = time.monotonic()
    show(f"drafters+targets+prefetchers; every end must be one that is right\n\n{HEADER}")
    done: list[Row] = []
    for row in rows([*jobs(arguments)], arguments.timeout_s, show):
        done.append(row)
        show(row.text())
    _show_schedules(done, arguments.bug or (), show)
    outcome, reason = judged(done)
    return {
        **{"outcome": outcome, "reason": reason, "rows": [row.summary() for row in done]},
        "seconds": round(time.monotonic() - started_s, 2),
    }


def _show_schedules(done: list[Row], asked: Sequence[str], show: Callable[[str], None]) -> None:
    """Those of the bugs that were asked for; else of what fails, or of the first bug."""
    failing = [row for row in done if row.reached.simplest]
    real = [row for row in failing if not row.job.bug]
    for row in [row for row in failing if row.job.bug in asked] or real[:1] or failing[:1]:
        schedule = row.reached.simplest
        assert schedule is not None
        what = f"{BUGS[row.job.bug].what}, {row.job.scenario}" if row.job.bug else str(row.job)
        show(f"\nThe simplest that fails, {what}: {_times(schedule.preemptions)}\n")
        show("\n".join(steps_in_lanes(schedule)))


def judged(done: Sequence[Row]) -> tuple[str, str]:
    """The outcome and its reason: a failure first, then what proves nothing."""
    real = [row for row in done if not row.job.bug]
    if not real:
        return "cannot tell", "nothing was searched: --quick has no prefetch thread"
    for row in real:
        if row.reached.simplest is not None:
            return "reproduced", f"{row.job}: {row.reached.simplest.failure}"
    for row in real:
        if not row.reached.complete:
            why = row.reached.unclear or "cut short"
            return "cannot tell", f"{row.job}: {why.partition(chr(10))[0]}"
    if missed := [row.job.bug for row in done if row.job.bug and not row.reached.failing]:
        return "cannot tell", f"planted bugs were not found: {', '.join(missed)}"
    if differing := _differing(real):
        return "cannot tell", f"{differing}: with and without the reductions, other ends"
    return "absent", _told(done)


def _differing(done: Sequence[Row]) -> str:
    """A scenario that ends otherwise without the reductions."""
    for row in done:
        for other in done:
            same = (row.job.scenario, row.job.size) == (other.job.scenario, other.job.size)
            ends = set(row.reached.outcomes), set(other.reached.outcomes)
            if same and other.job.how == UNREDUCED and ends[0] != ends[1]:
                return row.job.scenario
    return ""


def _told(done: Sequence[Row]) -> str:
    real = [row for row in done if row.job.how == REDUCED]
    bugs = sum(1 for row in done if row.job.bug)
    states = sum(row.reached.states for row in real)
    parts = [f"{len(real)} search{'es' * (len(real) > 1)} over {states} states, clean"]
    bounds = [row.bound for row in real]
    for bound in sorted(set(bounds), key=lambda bound: -1 if bound is None else bound):
        reach = "exhaustive" if bound is None else f"to {_times(bound)}"
        parts.append(f"{bounds.count(bound)} {reach}")
    found = f"; {bugs} of {bugs} planted bugs found" if bugs else ""
    return ", ".join(parts) + found


def _times(preemptions: int) -> str:
    return {0: "no preemption", 1: "1 preemption"}.get(preemptions, f"{preemptions} preemptions")


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--scenario", action="append", choices=[*SCENARIOS], help="only this; repeatable")
    add("--bug", action="append", choices=[*BUGS], help="of the bugs only this, and show it")
    size = options.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="2 drafters and 1 target only")
    size.add_argument("--full", action="store_true", help="a prefetch thread too; takes minutes")
    add("--timeout-s", type=float, default=1800.0, metavar="S", help="limit for one search")
    add("--json", action="store_true", help="print the last line only")
    return options


def main() -> None:
    """Search; the JSON line, then the exit code."""
    arguments = parser().parse_args()
    show: Callable[[str], None] = partial(print, flush=True)
    show = (lambda _text: None) if arguments.json else show
    line = check(arguments, show)
    show("")
    print(json.dumps(line), flush=True)
    sys.exit(EXIT_CODES[line["outcome"]])


if __name__ == "__main__":
    main()
