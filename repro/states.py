"""Every state that a few threads can reach: the search of interleavings.py without what repeats.

Two reductions, both exact. Schedules that differ in the order of a few steps soon meet in one
state, from which everything goes on alike: a state is gone on from once (`Trial.state` says which
are equal). And *dynamic partial-order reduction*, in its stateful form (Yang, Chen, Gopalakrishnan,
Kirby, Efficient Stateful Dynamic Partial Order Reduction, SPIN 2008), simplified: for each state it
is kept what the steps below it touch, by thread; where a step taken from a state turns out to be
independent of every step that another thread takes below, the other options of that state are not
tried.

Why nothing is missed: let p take step s from a state, and let all that others do afterwards be
independent of s. Suppose that from the same state others could go t1 ... tk without p, tk being the
first that depends on s. Then t1 ... t(k-1) can be taken after s as well, with the same effect, and
so can tk, and it was met below s: a contradiction. (That s keeps tk from being taken counts as
dependence: what a waiting thread is waiting for is read each time it is looked at, `Touched.looks`,
and these reads are kept like steps.) So p alone is a persistent set of that state, and every end
that can be reached, deadlocks included, is reached through s. Threads that s itself starts cannot
come before it. Timeouts that are open because nobody can go on are never left out, nor is anything
where a state leads back to itself.

With a bound on preemptions nothing is left out that way, because the order left out could have
been the cheaper one; there a state is gone on from again when another thread that could go on ran
last, or with fewer preemptions spent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from interleavings import DEADLINE_S, Choice, Schedule, Trial, play, simplicity
from turns import Player, Touched, Unclear

EVERYTHING = -1  # as a set of steps


@dataclass
class Reached:
    """What a search met. Its schedules end where a known state is met, `ended` ones at an end.

    It is all there is, within the bound on preemptions, only if `complete`.
    """

    states: int = 0
    steps: int = 0
    runs: int = 0
    ended: int = 0
    failing: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    simplest: Schedule | None = None
    complete: bool = False
    unclear: str = ""

    def add(self, schedule: Schedule) -> None:
        """Count a schedule that came to its end."""
        self.ended += 1
        self.outcomes[schedule.failure or schedule.outcome] += 1
        if schedule.failure:
            self.failing += 1
            if self.simplest is None or simplicity(schedule) < simplicity(self.simplest):
                self.simplest = schedule


class _Dependence:
    """Numbers what threads do, and tells sets of such numbers (as bits) that depend on one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Touched], int] = {}
        self._threads: dict[str, int] = {}
        self._dependent: list[int] = []

    def bit(self, thread: str, touched: Touched) -> int:
        """The set of this alone."""
        number = self._numbers.get((thread, touched))
        if number is None:
            number = len(self._numbers)
            dependent = 0
            for (other, what), known in self._numbers.items():
                if other != thread and what.meets(touched):
                    dependent |= 1 << known
                    self._dependent[known] |= 1 << number
            self._numbers[thread, touched] = number
            self._dependent.append(dependent)
            self._threads[thread] = self._threads.get(thread, 0) | 1 << number
        return 1 << number

    def on(self, bit: int, steps: int, threads: Sequence[str]) -> bool:
        """Whether some of the steps that these threads take depends on that one."""
        of_threads = 0
        for thread in threads:
            of_threads |= self._threads.get(thread, 0)
        return bool(self._dependent[bit.bit_length() - 1] & steps & of_threads)


@dataclass
class _Node:
    """A state on the way that is being run, and what is still to be tried from it."""

    state: Hashable
    choice: Choice
    spent: int
    todo: list[int]
    alive: list[str]
    below: int = 0  # all that was met below, by whichever option
    own: int = 0  # what the step that is being tried did
    step: int = 0  # and with what others looked at meanwhile
    after_step: int = 0  # what was met after it

    @property
    def taken(self) -> int:
        return self.todo[0]


class Search:
    """One search over states, depth first; each run begins anew and is cut at a known state.

    Args:
        fresh: makes the trial.
        preemptions: how often a schedule may take the turn from a thread that could go on.
        reduce: leave out orders that do not matter; never with a bound on preemptions.
        shortest: with a bound, look for the shortest failing schedule, and only for that: go on
            from a state again when it is met in fewer steps, and never further than is of use.
        limit: how many runs to make at most.
        progress: called with what was reached so far, after each run.
    """

    def __init__(
        self,
        fresh: Callable[[], Trial],
        *,
        preemptions: int | None = None,
        reduce: bool = True,
        shortest: bool = False,
        limit: int | None = None,
        progress: Callable[[Reached], None] = lambda _reached: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._fresh, self._bound, self._limit = fresh, preemptions, limit
        self._reduce, self._shortest = reduce and preemptions is None, shortest
        self._progress, self._deadline_s = progress, deadline_s
        self._dependence = _Dependence()
        self._below: dict[Hashable, int] = {}
        self._spent: dict[Hashable, list[tuple[int, int]]] = {}
        self._path: list[_Node] = []
        self._depth = 0
        self._trial: Trial
        self.reached = Reached()

    def run(self) -> Reached:
        """Search until nothing is left, or the limit is hit."""
        reached = self.reached
        while reached.runs != self._limit:
            try:
                self._run_once()
            except Unclear as unclear:
                reached.unclear = str(unclear)
                return reached
            reached.runs += 1
            self._progress(reached)
            if not self._next():
                reached.complete = True
                return reached
        return reached

    def _run_once(self) -> None:
        self._trial, self._depth = self._fresh(), 0
        played = play(self._trial, {}, self._pick, self._deadline_s)
        if not played.cut:
            self._arrived()
            self.reached.add(played.schedule())

    def _next(self) -> bool:
        """Turn to the last state from which something is left to try; False if there is none."""
        while self._path:
            node = self._path[-1]
            node.below |= node.step | node.after_step
            if self._is_enough(node):
                node.todo.clear()
            else:
                del node.todo[0]
            node.step = node.after_step = 0
            if node.todo:
                return True
            self._path.pop()
            if node.state is not None:
                self._below[node.state] = node.below
            if self._path:
                self._path[-1].after_step |= node.below
        return False

    def _is_enough(self, node: _Node) -> bool:
        """Whether nothing that others do depends on the step that was taken from here."""
        if not self._reduce or node.choice.late or node.after_step == EVERYTHING:
            return False
        me = node.choice.options[node.taken].thread
        return not self._dependence.on(
            node.own, node.step | node.after_step, [name for name in node.alive if name != me]
        )

    def _pick(self, choice: Choice, company: Sequence[Player]) -> int | None:
        if self._depth:
            self._arrived()
        if self._depth == len(self._path):
            node = self._met(choice, company)
            if node is None:
                return None
            self._path.append(node)
        node = self._path[self._depth]
        if node.choice.options != choice.options:
            raise Unclear("a replayed schedule met other points: the threads are not deterministic")
        self._depth += 1
        return node.taken

    def _arrived(self) -> None:
        """Note what the last step touched."""
        node, touched = self._path[self._depth - 1], self._trial.touched()
        if self._reduce:
            node.own = self._dependence.bit(
                node.choice.options[node.taken].thread, touched._replace(looks=())
            )
            node.step = node.own
            for thread, look in touched.looks:
                node.step |= self._dependence.bit(thread, look)

    def _met(self, choice: Choice, company: Sequence[Player]) -> _Node | None:
        """The state as met now; None if there is nothing to be tried from it."""
        before = self._path[-1] if self._path else None
        spent = before.spent + before.choice.cost(before.taken) if before else 0
        self.reached.steps += before is not None
        alive = [player.name for player in company if not player.ended]
        options = list(range(len(choice.options)))
        best = self.reached.simplest
        if self._shortest and best is not None and self._depth >= len(best.steps):
            return None
        if len(options) == 1:
            return _Node(None, choice, spent, options, alive)
        state = self._trial.state(company)
        if self._bound is not None:
            options = self._affordable(state, choice, spent)
            return _Node(None, choice, spent, options, alive) if options else None
        if state in self._below:
            assert before is not None
            before.after_step |= self._below[state]
            return None
        self.reached.states += 1
        self._below[state] = EVERYTHING  # until it is known
        return _Node(state, choice, spent, options, alive)

    def _affordable(self, state: Hashable, choice: Choice, spent: int) -> list[int]:
        """The options within the bound; none if the state was met at no higher a price."""
        assert self._bound is not None
        # Who ran last counts only where it could go on.
        prices = self._spent.setdefault((state, choice.running and choice.after), [])
        self.reached.states += not prices
        depth = self._depth if self._shortest else 0
        if any(paid <= spent and deep <= depth for paid, deep in prices):
            return []
        prices.append((spent, depth))
        options = range(len(choice.options))
        return [n for n in options if spent + choice.cost(n) <= self._bound]
