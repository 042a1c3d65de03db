"""Search all interleavings of two threads in torch's own tracing code, with each cure.

    python repro/explore.py --scenario trace-call --cure patcher-isolation
    python repro/explore.py --scenario trace-trace --save bad.json; python ... --replay bad.json

For each scenario and cure: how many schedules there are, how many of them fail, whether that is all
there are, and whether those that fail are the same as with no cure, which proves that the cure does
nothing there. "The same" compares what is left of the schedules when steps at points that only one
of the two searches has are struck out, and no schedule that is fine may then equal one that fails.
Then the simplest schedule that fails with no cure.

What is proved is bounded: two threads, the points of fx_points.py, and for some scenarios the
number of preemptions. Where both threads do the same, the first one begins: mirror images of
schedules are left out. The search with no cure is always made, and it decides the exit code: 10
some schedule fails, 0 none does and none is left out, 125 cannot tell. With --replay it is that
schedule which decides. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fx_points
import harness
import torch
import torch._dynamo  # imported once here, instead of lazily in every child
from children import Child
from cures import CURES, dflash_module
from fx_scenarios import SCENARIOS, Ground
from interleavings import Exploration, Schedule, Trial, explore, replay
from stage import Stage
from timeline import as_data, timeline
from torch._dynamo import convert_frame
from turns import CooperativeLock, Step, Unclear, Watched

TORCH = str(torch.__version__)
NO_CURE = "none"
# Those that change torch for a whole run; the others hold locks of their own around steps.
EXPLORED = (
    *(NO_CURE, "module-class-swap", "sys-modules-wrapper"),
    *("thread-local-flag", "patcher-isolation", "shipped"),
)
HEADER = (
    f"{'scenario':<14}{'cure':<21}{'schedules':>9}{'bad':>6}  {'searched':<17}{'s':>6}  bad ones"
)


@dataclass(frozen=True)
class Row:
    """What the search of one scenario with one cure found, and the part of it that is printed."""

    scenario: str
    cure: str
    bound: int | None
    seconds: float
    found: Exploration

    @property
    def unclear(self) -> str:
        """Why this proves nothing: a thread that never stops was not interleaved with anything."""
        met = {step.thread for schedule in self.found.schedules for step in schedule.steps}
        idle = SCENARIOS[self.scenario].roles.keys() - met
        if self.found.unclear or not idle:
            return self.found.unclear
        return f"{', '.join(sorted(idle))} met no point: this torch touches its state elsewhere"

    @property
    def outcome(self) -> str:
        if self.found.bad:
            return "reproduced"
        return "absent" if self.found.complete and not self.unclear else "cannot tell"

    @property
    def searched(self) -> str:
        """How far the search went; the words of an incomplete one never sound like a proof."""
        if self.unclear:
            return "cannot tell"
        if not self.found.complete:
            return "not exhaustive"
        return "exhaustive" if self.bound is None else f"<= {self.bound} preemptions"

    @property
    def counts(self) -> str:
        return f"{len(self.found.bad)} of {len(self.found.schedules)} schedules fail"

    def bad_set(self, bare: Row) -> str:
        """How the failing schedules compare with those of the search with no cure."""
        if self.cure == NO_CURE or not (self.found.complete and bare.found.complete):
            return ""
        if not self.found.bad:
            return "none" if bare.found.bad else "none here either"
        (bad, fine), (bare_bad, bare_fine) = _projected(self, bare), _projected(bare, self)
        return "the same" if bad == bare_bad and not bad & (fine | bare_fine) else "others"

    def summary(self, bare: Row) -> dict[str, Any]:
        """The row in the JSON line."""
        return {
            **{"scenario": self.scenario, "cure": self.cure, "outcome": self.outcome},
            **{"schedules": len(self.found.schedules), "bad": len(self.found.bad)},
            **{"complete": self.found.complete, "preemptions": self.bound},
            **{"bad_set": self.bad_set(bare), "unclear": self.unclear, "seconds": self.seconds},
            "roles": SCENARIOS[self.scenario].roles,
            "schedule": as_data(next(iter(self.found.bad), None)),
        }

    def text(self, bare: Row) -> str:
        counts = f"{len(self.found.schedules):>9}{len(self.found.bad):>6}"
        line = f"{self.scenario:<14}{self.cure:<21}{counts}  {self.searched:<17}"
        line += f"{self.seconds:>6.1f}  {self.bad_set(bare)}"
        return "\n".join([line.rstrip(), *(f"    {why}" for why in self.unclear.splitlines())])


def _projected(one: Row, other: Row) -> tuple[set[tuple[Step, ...]], set[tuple[Step, ...]]]:
    """The schedules that fail and those that do not, without the steps that the other lacks."""
    points = {step for schedule in other.found.schedules for step in schedule.steps}
    bad: set[tuple[Step, ...]] = set()
    fine: set[tuple[Step, ...]] = set()
    for schedule in one.found.schedules:
        kept = tuple(step for step in schedule.steps if step in points)
        (bad if schedule.failure else fine).add(kept)
    return bad, fine


def searched(scenario: str, cure: str, bound: int | None, limit: int | None) -> Row:
    """Search in this process, which is torn afterwards."""

    def search(fresh: Callable[[], Trial], watched: Watched) -> Exploration:
        alike = SCENARIOS[scenario].alike
        return explore(fresh, watched, alike=alike, preemptions=bound, limit=limit)

    started_s = time.monotonic()
    found = prepared(scenario, cure, search)
    return Row(scenario, cure, bound, round(time.monotonic() - started_s, 2), found)


def prepared(scenario: str, cure: str, act: Callable[[Callable[[], Trial], Watched], Any]) -> Any:
    """`act`, given the trials and the points, where the cure is installed."""
    # Before the cure: Dynamo looks the lock up when it takes it, a cure when it is installed.
    vars(convert_frame)["compile_lock"] = CooperativeLock("compile_lock")
    with CURES[cure](Stage()).installed():
        watched = fx_points.watched()
        ground = Ground(watched)
        bodies = SCENARIOS[scenario].bodies(ground)
        return act(lambda: ground.trial(bodies), watched)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Scenario by scenario, a few children at a time, in the order in which they are printed."""
    cures = dict.fromkeys((NO_CURE, *(arguments.cure or EXPLORED)))
    waiting = deque((s, cure) for s in arguments.scenario or SCENARIOS for cure in cures)
    running: deque[tuple[str, str, int | None, Child]] = deque()
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            scenario, cure = waiting.popleft()
            bound = SCENARIOS[scenario].preemptions
            bound = bound if arguments.preemptions is None else arguments.preemptions
            act = partial(searched, scenario, cure, bound, arguments.limit)
            running.append((scenario, cure, bound, Child(act, arguments.timeout_s)))
        scenario, cure, bound, child = running.popleft()
        try:
            yield child.answer()
        except Unclear as unclear:
            yield Row(scenario, cure, bound, 0.0, Exploration((), False, str(unclear)))


def search(arguments: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Print the rows and the simplest failing schedule; return the JSON line."""
    started_s = time.monotonic()
    show(f"torch {TORCH}, two threads, one at a time between the points\n\n{HEADER}")
    done: list[Row] = []
    bare: dict[str, Row] = {}
    for row in rows(arguments):
        done.append(row)
        show(row.text(bare.setdefault(row.scenario, row)))
    failing = [row for row in done if row.found.bad]
    if failing:
        _show_simplest(failing[0], show)
    if arguments.save and failing:
        arguments.save.write_text(json.dumps(_saved(failing[0]), indent=1) + "\n")
    outcome, reason = judged(list(bare.values()))
    return {
        **{"outcome": outcome, "reason": reason, "torch": TORCH},
        "rows": [row.summary(bare[row.scenario]) for row in done],
        "saved": str(arguments.save) if arguments.save and failing else None,
        "seconds": round(time.monotonic() - started_s, 2),
    }


def judged(bare: list[Row]) -> tuple[str, str]:
    """The outcome and its reason, by the searches with no cure."""
    outcomes = [row.outcome for row in bare]
    outcome = next((o for o in ("reproduced", "cannot tell") if o in outcomes), "absent")
    parts = [
        f"{row.scenario}: {row.unclear.partition(chr(10))[0] or row.counts}"
        for row in bare
        if row.outcome == outcome
    ]
    return outcome, "; ".join(parts)


def _show_simplest(row: Row, show: Callable[[str], None]) -> None:
    simplest = row.found.bad[0]
    cure = "no cure" if row.cure == NO_CURE else row.cure
    times = "once" if simplest.preemptions == 1 else f"{simplest.preemptions} times"
    show(f"\nThe simplest that fails, {row.scenario} with {cure}: a thread is preempted {times}\n")
    _show_timeline(row.scenario, simplest, show)


def _show_timeline(scenario: str, schedule: Schedule, show: Callable[[str], None]) -> None:
    show("\n".join(timeline(schedule, SCENARIOS[scenario].roles)))


def _saved(row: Row) -> dict[str, Any]:
    simplest = row.found.bad[0]
    return {
        **{"scenario": row.scenario, "cure": row.cure, "torch": TORCH},
        **{"failure": simplest.failure, "steps": simplest.steps},
    }


def read_saved(path: str) -> dict[str, Any]:
    """A saved schedule, as an option's type: raises ArgumentTypeError if it is none."""
    try:
        saved = json.loads(Path(path).read_text())
        saved["steps"] = [Step(thread, point) for thread, point in saved["steps"]]
        if saved["scenario"] not in SCENARIOS or saved["cure"] not in CURES or not saved["torch"]:
            raise ValueError(f"no scenario {saved['scenario']} or no cure {saved['cure']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no saved schedule: {error!r}") from error
    return dict(saved)


def again(saved: dict[str, Any], timeout_s: float, show: Callable[[str], None]) -> dict[str, Any]:
    """Run the saved schedule once more; return the JSON line."""
    scenario, cure = saved["scenario"], saved["cure"]
    line = {"torch": TORCH, "scenario": scenario, "cure": cure}
    if saved["torch"] != TORCH:
        reason = f"saved with torch {saved['torch']}, where the points are others"
        return {"outcome": "cannot tell", "reason": reason, **line}
    act = partial(prepared, scenario, cure, partial(replay, steps=saved["steps"]))
    try:
        schedule = Child(act, timeout_s).answer()
    except Unclear as unclear:
        return {"outcome": "cannot tell", "reason": str(unclear), **line}
    _show_timeline(scenario, schedule, show)
    outcome = "reproduced" if schedule.failure else "absent"
    return {"outcome": outcome, "reason": schedule.failure or "nothing is wrong", **line}


def at_least(minimum: int) -> Callable[[str], int]:
    """An option's type."""

    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return number


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--scenario", action="append", choices=list(SCENARIOS), help="only this; repeatable")
    add("--cure", action="append", choices=EXPLORED, help="only no cure and this; repeatable")
    add("--preemptions", type=at_least(0), metavar="N", help="at most, instead of the scenario's")
    add("--limit", type=at_least(1), metavar="N", help="stop after so many schedules of a search")
    add("--save", type=Path, metavar="FILE", help="write the simplest failing schedule")
    add("--replay", type=read_saved, metavar="FILE", help="run that schedule, nothing else")
    add("--at-once", type=at_least(1), default=2, metavar="N", help="processes at a time")
    add("--timeout-s", type=float, default=120.0, metavar="S", help="limit for one search")
    add("--json", action="store_true", help="print the last line only")
    return options


def main() -> None:
    """Search, or replay; the JSON line, then the exit code."""
    arguments = parser().parse_args()
    dflash_module("compile").keep_stand_in_guard()  # the children have it from here: see DF014
    show: Callable[[str], None] = partial(print, flush=True)
    show = (lambda _text: None) if arguments.json else show
    if arguments.replay:
        line = again(arguments.replay, arguments.timeout_s, show)
    else:
        line = search(arguments, show)
    show("")
    print(json.dumps(line), flush=True)
    sys.exit(harness.EXIT_CODES[line["outcome"]])


if __name__ == "__main__":
    main()
