"""The pipeline's start-up in small: what its threads do, and what must hold however they do it.

The stages do what dflash/prefetch.py, target.py and drafter_loop.py do with the gate, the channels,
the task group and signals, on the real classes; their work is a step in which it is noted. What
must hold in every schedule:

P1  Nobody works before every drafter is warm: no batch is made, no target runs, no drafter trains.
P2  Every schedule ends, and an end that is no success names who is to blame.
P3  A failed warm-up never ends like a success.
P4  A success has lost no item, and no channel that was cut short ends cleanly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gate_bugs import Bug
from gate_model import MAIN, Machine
from turns import Ended

from dflash.concurrency import (
    ChannelBroken,
    EndOfChannel,
    Gate,
    GateTimeout,
    Scope,
    StuckThreads,
    TaskGroup,
)
from dflash.routing import RoutedReceiver, RoutedSender, indices, routes
from dflash.stop import StopRequest, on_signals

START_S, STALL_S, GRACE_S = 2.0, 5.0, 3.0
LIMITS: Any = SimpleNamespace(queue_capacity=1, stall_timeout_s=STALL_S)
FINISHED = "finished"


@dataclass(frozen=True)
class Size:
    """How many threads of each stage there are, and how many micro-batches go through them."""

    drafters: int
    targets: int
    prefetchers: int
    items: int

    def __str__(self) -> str:
        return f"{self.drafters}+{self.targets}+{self.prefetchers}"

    @property
    def names(self) -> list[str]:
        return [f"drafter-{rank}" for rank in range(self.drafters)]


@dataclass(frozen=True)
class Scenario:
    """What goes wrong, and by a regular expression, the ends that are right then."""

    what: str
    ends: str
    breaks: str = ""
    hangs: str = ""
    early_s: float = 0.0
    signals: bool = False


SCENARIOS = {
    "healthy": Scenario("nothing goes wrong", FINISHED),
    "raises": Scenario("drafter-1 raises in its warm-up", "Broke in drafter-1", breaks="drafter-1"),
    "hangs": Scenario(
        "drafter-1 never comes out of its warm-up",
        "drafter-1 did not stop; GateTimeout: drafter-1 warming up",
        hangs="drafter-1",
    ),
    "slow": Scenario(
        "anybody is so slow that the gate's limit may run out at any moment",
        r"finished|GateTimeout: drafter-\d (not started|warming up)(, drafter-\d .*)?",
        early_s=START_S,
    ),
    "target-raises": Scenario(
        "target-0 raises right behind the gate", "Broke in target-0", breaks="target-0"
    ),
    "prefetch-raises": Scenario(
        "prefetch-0 raises right behind the gate", "Broke in prefetch-0", breaks="prefetch-0"
    ),
    "stop": Scenario("SIGTERM comes at any moment", "finished|stopped|cancelled", signals=True),
    "stop-hangs": Scenario(
        "SIGTERM comes at any moment, and drafter-1 hangs in its warm-up",
        "cancelled|drafter-1 did not stop(; GateTimeout: drafter-1 warming up)?",
        hangs="drafter-1",
        signals=True,
    ),
}


class Broke(Exception):
    """What a stage dies of."""


@dataclass
class World:
    """One run of the pipeline, and what was seen in it."""

    machine: Machine
    size: Size
    scenario: Scenario
    bug: Bug | None
    cold: set[str] = field(default_factory=set)
    trained: dict[str, list[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cold |= set(self.size.names)

    def main(self) -> str:
        """What trainer.py does from the making of the group on; returns how it ended."""
        stop = StopRequest()
        group = TaskGroup("train", GRACE_S)
        gate = Gate(group.scope, self.size.names, START_S)
        with on_signals(stop, group.scope, gate), group:
            self._start(group, gate, stop)
        if stop.stopped_after is not None:
            return "stopped"
        return "cancelled" if group.scope.reason is not None else FINISHED

    def _start(self, group: TaskGroup, gate: Gate, stop: StopRequest) -> None:
        size, scope = self.size, group.scope
        batches = routes(scope, size.prefetchers, size.targets, "batches", LIMITS)
        features = routes(scope, size.targets, size.drafters, "features", LIMITS)
        for rank, sender in enumerate(batches[0]):
            group.start(self.prefetch, sender, rank, gate, name=f"prefetch-{rank}")
        for rank in range(size.targets):
            ends = (batches[1][rank], features[0][rank])
            group.start(self.target, *ends, rank, gate, name=f"target-{rank}")
        for rank, name in enumerate(size.names):
            group.start(self.drafter, features[1][rank], rank, scope, gate, stop, name=name)

    def prefetch(self, output: RoutedSender[int], rank: int, gate: Gate) -> None:
        """As dflash/prefetch.py, run_prefetch."""
        with output:
            gate.wait()
            for index in indices(rank, self.size.prefetchers, 0, self.size.items):
                self._works("makes a batch")
                output.send(index, index)

    def target(
        self, batches: RoutedReceiver[int], features: RoutedSender[int], rank: int, gate: Gate
    ) -> None:
        """As dflash/target.py, run_target."""
        with batches, features:
            gate.wait()
            for index in indices(rank, self.size.targets, 0, self.size.items):
                batch = self._receive(batches, index) if self.size.prefetchers else index
                self._works("runs a forward")
                features.send(index, batch)

    def drafter(
        self,
        features: RoutedReceiver[int],
        rank: int,
        scope: Scope,
        gate: Gate,
        stop: StopRequest,
    ) -> None:
        """As dflash/drafter_loop.py, DrafterTrainLoop.run."""
        name = self.machine.me()
        with features:
            gate.phase(name, "warming up")
            if self.bug and self.bug.arrives_first:
                gate.arrive(name)
            self._warms_up(name)
            if not (self.bug and self.bug.arrives_first):
                gate.arrive(name)
            gate.wait()
            for index in indices(rank, self.size.drafters, 0, self.size.items):
                item = self._receive(features, index)
                self._works("trains")
                self.trained.setdefault(name, []).append(item)
                if stop.is_set():
                    self.machine.record.writes("stopped after")
                    stop.finish(scope, index)
                    return

    def _receive(self, channel: RoutedReceiver[int], index: int) -> int:
        try:
            return channel.receive(index)
        except ChannelBroken as broken:
            if isinstance(broken.__cause__, EndOfChannel):
                me = self.machine.me()
                self.wrong.append(f"P4: to {me} a channel that was cut short ended cleanly")
            raise

    def _warms_up(self, name: str) -> None:
        hangs = name == self.scenario.hangs
        self.machine.work("hangs" if hangs else "warms up", lambda: not hangs)
        self.machine.record.writes("work")
        self._may_break(name)
        self.cold.discard(name)

    def _works(self, what: str) -> None:
        """Must not be a point: right behind the gate is when it would be too early."""
        me = self.machine.me()
        self.machine.record.reads("work")
        if self.cold:
            cold = " and ".join(sorted(self.cold))
            self.wrong.append(f"P1: {me} {what} while {cold} is not warm")
        self._may_break(me)

    def _may_break(self, me: str) -> None:
        if me == self.scenario.breaks:
            raise Broke(me)

    def failed(self) -> str | None:
        """What is wrong so far."""
        if self.wrong:
            return self.wrong[0]
        if self.machine.ran_out and not (self.scenario.hangs or self.scenario.early_s):
            return f"P2: {self.machine.ran_out[0]}"
        # The model relies on this where it leaves threads alone that would be woken in vain.
        if self.machine.atomic and (names := self.machine.forgotten()):
            return f"P2: nobody wakes {names[0]}, and what it waits for is there"
        return None

    def outcome(self, ended: Mapping[str, Ended]) -> str:
        """How the program ended, by what its main thread returned or raised."""
        end = ended[MAIN]
        if isinstance(end.error, StuckThreads):
            cause = end.error.__cause__
            why = f"; {_told(cause)}" if cause is not None else ""
            return f"{', '.join(end.error.names)} did not stop{why}"
        return _told(end.error) if end.error is not None else str(end.value)

    def judge(self, ended: Mapping[str, Ended]) -> str | None:
        """Which property does not hold, and how."""
        if failed := self.failed():
            return failed
        outcome = self.outcome(ended)
        if outcome == FINISHED and (lost := self._lost()):
            return f"P4: {lost}"
        if not re.fullmatch(self.scenario.ends, outcome):
            return f"{'P3' if outcome == FINISHED else 'P2'}: the run ends as {outcome!r}"
        left = self.machine.threads.keys() - ended.keys() - {self.scenario.hangs}
        return f"P2: {', '.join(sorted(left))} still waits" if left else None

    def _lost(self) -> str:
        for rank, name in enumerate(self.size.names):
            share = [*indices(rank, self.size.drafters, 0, self.size.items)]
            if (got := self.trained.get(name, [])) != share:
                return f"{name} trained on items {got} instead of {share}"
        return ""


def _told(error: BaseException) -> str:
    """The root cause, the thread it came from, and at the gate, who was missing."""
    if isinstance(error, BaseExceptionGroup):
        return _told(error.exceptions[0])
    if isinstance(error, GateTimeout):
        missing = ", ".join(f"{party.party} {party.phase}" for party in error.missing)
        return f"GateTimeout: {missing}"
    thread = re.search("in thread (.+) of", "".join(getattr(error, "__notes__", ())))
    return f"{type(error).__name__} in {thread[1] if thread else 'nobody'}"
