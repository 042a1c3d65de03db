"""Stand-ins for `threading.Condition` and `threading.Thread`, whose operations are points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from turns import Move, Player, this_player

from dflash.concurrency import scope

if TYPE_CHECKING:
    from gate_model import Machine

# What a thread is about to do, by the function that asks for the monitor; {names} are its locals.
DOES = {
    "phase": "says it is {text}",
    "arrive": "arrives at the gate",
    "wait": "asks for the gate",
    "missing": "asks who is missing",
    "send": "sends to {self.name}",
    "receive": "receives from {self.name}",
    "_leave": "leaves {self.name}",
    "cancel": "cancels: {reason}",
    "start": "starts {name}",
    "_run": "has ended",
    "_fail": "fails: {error.__class__.__name__}",
    "_join": "waits for all threads",
    "_failed": "gathers the failures",
}


def _does() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if text := DOES.get(frame.f_code.co_name):
            return text.format_map(frame.f_locals)
        frame = frame.f_back
    return "takes the monitor"


def _predicate_of(caller: FrameType) -> Callable[[], object] | None:
    """What a loop around a wait is waiting for, where that is told by its name."""
    predicate: Callable[[], object] | None = caller.f_locals.get("predicate")
    return predicate


@dataclass(eq=False)
class Waiter:
    """A thread that waits, until when, and for what, if that is known.

    `looks_again`: it wakes by itself soon, as the main thread does, because of signals.
    """

    name: str
    due_s: float
    predicate: Callable[[], object] | None
    looks_again: bool
    notified: bool = False

    def is_in_vain(self, now_s: float) -> bool:
        """Whether it was woken for what it does not wait for: it looks, and waits again."""
        if not self.notified or self.predicate is None or now_s >= self.due_s:
            return False
        return not self.predicate()

    def is_forgotten(self) -> bool:
        """Whether nobody wakes it although what it waits for is there."""
        if self.notified or self.looks_again or self.predicate is None:
            return False
        return bool(self.predicate())


class Monitor:
    """Stands in for the scope's `threading.Condition`, re-entrant as that one."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.owner = ""
        self.depth = 0
        self.waiters: list[Waiter] = []

    def __enter__(self) -> None:
        me = self.machine.me()
        if self.owner != me:
            self.machine.pause(Move(_does(), lambda: not self.owner))
            self.owner = me
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if self.depth == 1:
            self.machine.pause_within("releases the monitor")
        self.depth -= 1
        if not self.depth:
            self._is_free()

    def wait(self, timeout_s: float) -> None:
        """Give the monitor back until notified, or out of time."""
        machine, me, depth, does = self.machine, self.machine.me(), self.depth, _does()
        machine.pause_within("begins to wait")
        machine.record.waits()
        looks_again = timeout_s <= scope.SIGNAL_RECHECK_S
        predicate = _predicate_of(sys._getframe(1))
        waiter = Waiter(me, machine.now_s + timeout_s, predicate, looks_again)
        self.waiters = sorted([*self.waiters, waiter], key=lambda waiter: waiter.name)
        self._is_free()
        moves = [Move(f"wakes, {does}", lambda: not self.owner and waiter.notified)]
        if timeout_s < machine.TIMEOUT_MAX:
            early = waiter.due_s == machine.early_s
            late = Move(f"is out of time: {does}", lambda: not self.owner and not waiter.notified)
            moves.append(late if early else late._replace(due_s=waiter.due_s))
        try:
            if machine.pause(*moves) != moves[0].point:
                machine.record.writes("clock")
                if not looks_again:
                    machine.ran_out.append(f"{me} waits until its limit: {does}")
                machine.now_s = max(machine.now_s, waiter.due_s)
        finally:
            self.waiters.remove(waiter)
            self.owner, self.depth = me, depth

    def _is_free(self) -> None:
        if self.machine.skips_vain:
            for waiter in self.waiters:
                with self.machine.looking_for(waiter.name):
                    waiter.notified &= not waiter.is_in_vain(self.machine.now_s)
        self.owner, self.depth = "", 0

    def notify_all(self) -> None:
        """Let all that wait go on."""
        self.machine.pause_within("notifies all")
        self.machine.record.notifies()
        for waiter in self.waiters:
            waiter.notified = True

    def notify(self) -> None:
        """Let one go on, the first by name: which one is not promised."""
        self.machine.pause_within("notifies one")
        self.machine.record.notifies()
        for waiter in [w for w in self.waiters if not w.notified][:1]:
            waiter.notified = True


class Thread:
    """Stands in for `threading.Thread`."""

    ident = native_id = None

    def __init__(
        self, machine: Machine, run: Callable[..., object], name: str, args: tuple[Any, ...]
    ) -> None:
        self.name, self._machine, self._run, self._args = name, machine, run, args
        self._player: Player | None = None

    def __hash__(self) -> int:
        """By name, so that a set of threads has the same order in every schedule."""
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def start(self) -> None:
        """The thread runs from now on, when its turn comes."""
        player = this_player()
        assert player is not None
        self._machine.pause_within(f"creates {self.name}")
        self._machine.threads[self.name] = self
        self._player = Player(self.name, lambda: self._run(*self._args), {}, player.company)
        player.company.append(self._player)

    def join(self, _timeout_s: float) -> None:
        """Wait for its end."""
        self._machine.pause(Move(f"joins {self.name}", self._has_ended))

    def _has_ended(self) -> bool:
        return self._player is not None and self._player.ended is not None
