"""Every interleaving of a few threads: a bounded proof where sampling would give a chance.

The threads run by turns (turns.py), and who goes on at each point is a choice. All choices are
searched depth first, each schedule from a fresh start. What is claimed is bounded: these threads,
these points, and what lies between two points taken as indivisible. What a thread does before its
first point is no step of a schedule: it must touch nothing that is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turns import Ended, Player, Step, Touched, Unclear, Watched

DEADLINE_S = 20.0  # for one thread to come to its next point


def _nobody() -> str:
    return ""


def _not_yet() -> str | None:
    return None


def _nothing(_ended: Mapping[str, Ended]) -> str:
    return ""


@dataclass(frozen=True)
class Trial:
    """One fresh start: the threads' functions, and what is wrong once all have ended, or None.

    A body may start more players. With the end of the thread called `last`, if there is one, the
    program is over and takes the others with it. `alone` names a thread whose steps need not be
    interleaved with anything now; `failed` says what is wrong already, which ends the schedule.
    `outcome` says how it ended, right or wrong. The search of
    states.py asks for `state`, equal only where everything goes on alike, and for what was
    `touched` since it was last asked.
    """

    bodies: Mapping[str, Callable[[], object]]
    judge: Callable[[Mapping[str, Ended]], str | None]
    last: str = ""
    alone: Callable[[], str] = _nobody
    failed: Callable[[], str | None] = _not_yet
    outcome: Callable[[Mapping[str, Ended]], str] = _nothing
    state: Callable[[Sequence[Player]], Hashable] = id
    touched: Callable[[], Touched] = Touched


@dataclass(frozen=True)
class Schedule:
    """One interleaving; `failure` says what is bad about it."""

    steps: tuple[Step, ...]
    preemptions: int
    failure: str | None
    outcome: str = ""


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
        return sorted((one for one in self.schedules if one.failure), key=simplicity)


def simplicity(schedule: Schedule) -> tuple[int, int, int]:
    """Smallest for the simplest schedule."""
    return schedule.preemptions, len(schedule.steps), _first_run(schedule.steps)


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
    known: list[Choice] = []
    follow: list[Step] | None = []
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
    played = _play(fresh(), watched, steps, deadline_s).schedule()
    if played.steps != tuple(steps):
        raise Unclear("the schedule met other points than those that were recorded")
    return played


def _first_run(steps: Sequence[Step]) -> int:
    """How many steps the first thread makes before another one goes on."""
    return next((n for n, step in enumerate(steps) if step.thread != steps[0].thread), len(steps))


class Choice(NamedTuple):
    """Who could go on; which of them did; whether that may take the turn from the one before.

    `after` ran before; it comes first, if it is among the options. `running`: it could go on
    without a timeout or the like. `late`: the options are timeouts, since nobody can go on.
    """

    options: tuple[Step, ...]
    taken: int
    after: str
    running: bool
    late: bool

    @property
    def step(self) -> Step:
        return self.options[self.taken]

    def cost(self, taken: int) -> int:
        """1 if taking that option takes the turn from a thread that could have gone on."""
        return int(self.running and self.options[taken].thread != self.after)


class Played(NamedTuple):
    """A schedule that was run to its end, or as far as somebody was picked."""

    choices: list[Choice]
    failure: str | None
    outcome: str = ""
    cut: bool = False

    def schedule(self) -> Schedule:
        steps = tuple(choice.step for choice in self.choices)
        spent = sum(choice.cost(choice.taken) for choice in self.choices)
        return Schedule(steps, spent, self.failure, self.outcome)


Pick = Callable[[Choice, Sequence[Player]], int | None]


def play(trial: Trial, watched: Watched, pick: Pick, deadline_s: float = DEADLINE_S) -> Played:
    """Run one schedule; `pick` says which option is taken, or None to go no further."""
    company: list[Player] = []
    company += [Player(name, body, watched, company) for name, body in trial.bodies.items()]
    choices: list[Choice] = []
    try:
        while alive := _alive(company, trial.last, deadline_s):
            choice = _choice(alive, choices[-1].step.thread if choices else "", trial.alone())
            if failure := trial.failed():
                return Played(choices, failure)
            if not choice.options:
                return Played(choices, deadlock := _deadlock(alive), deadlock)
            taken = pick(choice, company)
            if taken is None:
                return Played(choices, None, cut=True)
            choices.append(choice._replace(taken=taken))
            step = choices[-1].step
            next(p for p in alive if p.name == step.thread).go_on(deadline_s, step.point)
    finally:
        _give_up([player for player in company if not player.ended], deadline_s)
    ended = {player.name: player.ended for player in company if player.ended}
    return Played(choices, trial.judge(ended), trial.outcome(ended))


def _play(trial: Trial, watched: Watched, follow: Sequence[Step], deadline_s: float) -> Played:
    """Run one schedule: as `follow` names the steps, then with as few switches as it goes."""
    number = 0

    def pick(choice: Choice, _company: Sequence[Player]) -> int:
        nonlocal number
        number += 1
        return _followed(choice, number, follow) if number <= len(follow) else 0

    return play(trial, watched, pick, deadline_s)


def _alive(company: list[Player], last: str, deadline_s: float) -> list[Player]:
    """Those that have not ended, each at a point; nobody once the program is over."""
    for player in company:
        if not player.begun:
            player.go_on(deadline_s)
    over = any(player.name == last and player.ended for player in company)
    return [] if over else [player for player in company if not player.ended]


def _choice(alive: list[Player], after: str, alone: str) -> Choice:
    """The options: every open way of every thread, timeouts where there is no other."""
    first = sorted(alive, key=lambda player: player.name != after)
    moves = [(player, move) for player in first for move in player.moves if move.ready()]
    if alone and any(player.name == alone for player, _ in moves):
        moves = [(player, move) for player, move in moves if player.name == alone]
    able = [(player, move) for player, move in moves if move.due_s is None]
    late = not able and bool(moves)
    if late:
        next_s = min(move.due_s or 0.0 for _, move in moves)
        able = [(player, move) for player, move in moves if move.due_s == next_s]
    running = any(player.name == after and move is player.moves[0] for player, move in able)
    options = tuple(Step(player.name, move.point) for player, move in able)
    return Choice(options, 0, after, running, late)


def _followed(choice: Choice, number: int, follow: Sequence[Step]) -> int:
    """Raises `Unclear` if the thread that `follow` has there cannot go on."""
    wanted = follow[number - 1]
    if wanted in choice.options:
        return choice.options.index(wanted)
    names = [step.thread for step in choice.options]
    if wanted.thread not in names:
        raise Unclear(f"step {number}: {wanted.thread} can not go on there any more")
    return names.index(wanted.thread)


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


def _compare(known: list[Choice], played: list[Choice], length: int) -> None:
    """Raises `Unclear` if a replayed beginning met other points than when it was recorded."""
    for number, (before, now) in enumerate(zip(known[:length], played, strict=False), start=1):
        if before.options != now.options:
            raise Unclear(
                f"step {number} of a replayed schedule met {_told(now)} instead of {_told(before)}:"
                " the threads do not do the same every time"
            )


def _told(choice: Choice) -> str:
    return ", ".join(f"{step.thread} '{step.point}'" for step in choice.options)


def _next(choices: list[Choice], fixed: int, bound: int | None) -> list[Step] | None:
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
            return [*(before.step for before in choices[:index]), choice.options[other]]
    return None
