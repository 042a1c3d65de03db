"""Every interleaving of a few threads: a bounded proof where sampling would give a chance.

The threads run by turns (turns.py), and who goes on at each point is a choice. All choices are
searched depth first, each schedule from a fresh start. What is claimed is bounded: these threads,
these points, and what lies between two points taken as indivisible. What a thread does before its
first point is no step of a schedule: it must touch nothing that is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turns import Ended, Player, Step, Unclear, Watched

DEADLINE_S = 20.0  # for one thread to come to its next point


@dataclass(frozen=True)
class Trial:
    """One fresh start: the threads' functions, and what is wrong once all have ended, or None."""

    bodies: Mapping[str, Callable[[], object]]
    judge: Callable[[Mapping[str, Ended]], str | None]


@dataclass(frozen=True)
class Schedule:
    """One interleaving; `failure` says what is bad about it."""

    steps: tuple[Step, ...]
    preemptions: int
    failure: str | None


@dataclass(frozen=True)
class Exploration:
    """The schedules that were run.

    They are all there are, within the bound on preemptions, only if `complete`; `unclear` says what
    ended the search before that, other than its limit.
    """

    schedules: tuple[Schedule, ...]
    complete: bool
    unclear: str = ""

    @property
    def bad(self) -> list[Schedule]:
        """The schedules that fail, the simplest first: few preemptions, few steps, an early one."""
        bad = (one for one in self.schedules if one.failure)
        return sorted(bad, key=lambda s: (s.preemptions, len(s.steps), _first_run(s.steps)))


def explore(
    fresh: Callable[[], Trial],
    watched: Watched,
    *,
    alike: bool = False,
    preemptions: int | None = None,
    limit: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> Exploration:
    """Run every schedule of a trial, each made anew by `fresh`.

    Args:
        alike: all threads do the same, so that it is enough to let the first one begin.
        preemptions: how often a schedule may take the turn from a thread that could go on.
        limit: how many schedules to run at most.
        deadline_s: for one thread to come to its next point.
    """
    found: list[Schedule] = []
    known: list[_Choice] = []
    follow: list[str] | None = []
    while follow is not None:
        if len(found) == limit:
            return Exploration(tuple(found), complete=False)
        try:
            played = _play(fresh(), watched, follow, deadline_s)
            _compare(known, played.choices, len(follow))
        except Unclear as unclear:
            return Exploration(tuple(found), complete=False, unclear=_why(unclear))
        found.append(played.schedule())
        known, follow = played.choices, _next(played.choices, int(alike), preemptions)
    return Exploration(tuple(found), complete=True)


def replay(
    fresh: Callable[[], Trial],
    watched: Watched,
    steps: Sequence[Step],
    deadline_s: float = DEADLINE_S,
) -> Schedule:
    """Run the one schedule of these steps; raises `Unclear` if its points are others by now."""
    played = _play(fresh(), watched, [step.thread for step in steps], deadline_s).schedule()
    if played.steps != tuple(steps):
        raise Unclear("the schedule met other points than those that were recorded")
    return played


def _first_run(steps: Sequence[Step]) -> int:
    """How many steps the first thread makes before another one goes on."""
    return next((n for n, step in enumerate(steps) if step.thread != steps[0].thread), len(steps))


class _Choice(NamedTuple):
    """Who could go on, first the thread that ran before; which of them did; who ran before."""

    options: tuple[Step, ...]
    taken: int
    after: str

    def cost(self, taken: int) -> int:
        """1 if taking that option takes the turn from a thread that could have gone on."""
        return int(taken > 0 and self.options[0].thread == self.after)


class _Played(NamedTuple):
    choices: list[_Choice]
    failure: str | None

    def schedule(self) -> Schedule:
        steps = tuple(choice.options[choice.taken] for choice in self.choices)
        spent = sum(choice.cost(choice.taken) for choice in self.choices)
        return Schedule(steps, spent, self.failure)


def _play(trial: Trial, watched: Watched, follow: Sequence[str], deadline_s: float) -> _Played:
    """Run one schedule: as `follow` names the threads, then with as few switches as it goes."""
    players = [Player(name, body, watched) for name, body in trial.bodies.items()]
    choices: list[_Choice] = []
    try:
        for player in players:
            player.go_on(deadline_s)
        while alive := [player for player in players if not player.ended]:
            able = [player for player in alive if player.ready()]
            if not able:
                return _Played(choices, _deadlock(alive))
            choices.append(_choose(able, choices, follow))
            step = choices[-1].options[choices[-1].taken]
            next(player for player in able if player.name == step.thread).go_on(deadline_s)
    finally:
        _give_up([player for player in players if not player.ended], deadline_s)
    return _Played(choices, trial.judge({p.name: p.ended for p in players if p.ended}))


def _choose(able: list[Player], before: list[_Choice], follow: Sequence[str]) -> _Choice:
    """Raises `Unclear` if the thread that `follow` names cannot go on."""
    after = before[-1].options[before[-1].taken].thread if before else ""
    options = tuple(p.step for p in sorted(able, key=lambda player: player.name != after))
    if len(before) >= len(follow):
        return _Choice(options, 0, after)
    names, name = [step.thread for step in options], follow[len(before)]
    if name not in names:
        raise Unclear(f"step {len(before) + 1}: {name} can not go on there any more")
    return _Choice(options, names.index(name), after)


def _deadlock(players: list[Player]) -> str:
    return "deadlock: " + ", ".join(f"{p.name} waits where it {p.point}" for p in players)


def _give_up(players: list[Player], deadline_s: float) -> None:
    # Who is out of sight comes last: what it waits for may be held by one of the others.
    last = sorted(players, key=lambda player: player.out_of_sight)
    if stuck := [player.name for player in last if not player.give_up(deadline_s)]:
        raise Unclear(f"{', '.join(stuck)} could not be ended")


def _why(unclear: Unclear) -> str:
    """Its text, after that of what it came out of."""
    return "\n".join(str(e) for e in (unclear.__context__, unclear) if isinstance(e, Unclear))


def _compare(known: list[_Choice], played: list[_Choice], length: int) -> None:
    """Raises `Unclear` if a replayed beginning met other points than when it was recorded."""
    for number, (before, now) in enumerate(zip(known[:length], played, strict=False), start=1):
        if before.options != now.options:
            raise Unclear(
                f"step {number} of a replayed schedule met {_told(now)} instead of {_told(before)}:"
                " the threads do not do the same every time"
            )


def _told(choice: _Choice) -> str:
    return ", ".join(f"{step.thread} '{step.point}'" for step in choice.options)


def _next(choices: list[_Choice], fixed: int, bound: int | None) -> list[str] | None:
    """Whom to follow for the next schedule: another choice, as late as there is one.

    The `fixed` first ones stay.
    """
    spent = [0]
    for choice in choices:
        spent.append(spent[-1] + choice.cost(choice.taken))
    for index in reversed(range(fixed, len(choices))):
        choice, other = choices[index], choices[index].taken + 1
        if other == len(choice.options):
            continue
        if bound is None or spent[index] + choice.cost(other) <= bound:
            done = [before.options[before.taken].thread for before in choices[:index]]
            return [*done, choice.options[other].thread]
    return None
