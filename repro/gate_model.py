"""The real dflash.concurrency under a scheduler: its condition, threads and clock are stand-ins.

`Machine.installed` puts a machine in the place of `threading` and `monotonic` in the modules of
dflash.concurrency, and of `signal` in dflash.stop. Their own code runs, unchanged. Points are: a
thread asks for the scope's monitor, waits, is notified or out of time, starts another, joins one;
and, where the machine is not `atomic`, notifies and gives the monitor back.

Time is virtual. It passes only when a timeout fires: when no thread can go on otherwise, the
earliest first; or, for the limits in `early_s`, at any moment, as if all others were slow.

A critical section is one step where the machine is `atomic`: who holds the monitor goes on alone.
Nobody else could do anything but ask for the monitor meanwhile, or read shared state without it;
such a read is a point of its own (`GUARDED`), and as it sees one attribute, which no section
changes twice, it sees the same right before or right after the section.

A thread that is woken while what it waits for is not there would look, and wait again: with
`skips_vain` it is not woken. That leaves nothing out as long as whoever brings what a thread waits
for also wakes it, before the section ends, and the wait is a loop. The first is checked at every
step (`forgotten`); for the second, searches without `skips_vain` are the control.

A signal comes at most once, at any point of the main thread, inside critical sections too, and its
handler runs there and then, in that thread, as Python's do.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gate_record import GUARDED, Record, channel, named
from gate_threads import Monitor, Thread
from turns import Move, Player, Touched, this_player

import dflash.stop
from dflash.concurrency import gate, scope, task_group

MAIN = "main"
SIGNAL = "gets SIGTERM"


class Machine:
    """Stands in for the modules `threading`, `time` and `signal`; `begin` makes it new.

    Args:
        atomic: a critical section is one step, but for signals in the main thread.
        skips_vain: a thread that was woken in vain is not even woken.
        early_s: the limit that may run out at any moment; 0 for none.
        signals: whether a signal may come while a handler is installed.
    """

    TIMEOUT_MAX = threading.TIMEOUT_MAX
    SIGINT, SIGTERM, Signals = signal.SIGINT, signal.SIGTERM, signal.Signals

    def __init__(self, *, atomic: bool, skips_vain: bool, early_s: float, signals: bool) -> None:
        self.atomic, self.skips_vain = atomic, skips_vain
        self.early_s, self.signals = early_s, signals
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self.now_s = 0.0
        self.watches = True
        self.ran_out: list[str] = []
        self.handlers: dict[int, Any] = {}
        self.signal_to_come = self.signals
        self.threads = {MAIN: SimpleNamespace(name=MAIN, ident=None, native_id=None)}
        self.monitors: list[Monitor] = []
        self.record = Record()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, dflash.concurrency runs on this machine."""
        with contextlib.ExitStack() as stack:
            for module in (scope, task_group):
                stack.enter_context(mock.patch.object(module, "threading", self))
            for module in (scope, channel, gate):
                stack.enter_context(mock.patch.object(module, "monotonic", self.monotonic))
            for module in (gate, task_group):  # the stacks are those of stand-ins
                stack.enter_context(mock.patch.object(module, "stacks_of", lambda _threads: ""))
            stack.enter_context(mock.patch.object(gate, "threading", self))
            stack.enter_context(mock.patch.object(dflash.stop, "signal", self))
            for kind, names in GUARDED.items():
                peeking = self._peeking(names)
                stack.enter_context(mock.patch.object(kind, "__getattribute__", peeking))
                assigning = self._assigning(names)
                stack.enter_context(mock.patch.object(kind, "__setattr__", assigning))
            yield

    # What the modules' names stand for.

    def Condition(self) -> Monitor:
        self.monitors.append(Monitor(self))
        return self.monitors[-1]

    def Thread(
        self,
        _group: None,
        run: Callable[..., object],
        name: str,
        args: tuple[Any, ...],
        daemon: bool,
    ) -> Thread:
        assert daemon, "a thread that may be stuck must not keep the process alive"
        return Thread(self, run, name, args)

    def current_thread(self) -> Any:
        return self.threads[self.me()]

    def main_thread(self) -> Any:
        return self.threads[MAIN]

    def monotonic(self) -> float:
        self.record.reads("clock")
        return self.now_s

    def signal(self, number: int, handler: Any) -> Any:
        before, self.handlers[number] = self.handlers.get(number), handler
        return before

    # What the stand-ins use.

    def me(self) -> str:
        """The name of the calling thread."""
        player = this_player()
        return player.name if player else ""

    def pause(self, *moves: Move) -> str:
        """Stop at a point; returns the move that is taken. A signal may come first."""
        player = this_player()
        if player is None:
            return moves[0].point
        while True:
            taken = player.stop(*moves, *self._signal(player))
            if taken != SIGNAL:
                return taken
            self.record.writes("work")
            self.signal_to_come = False
            self.handlers[signal.SIGTERM](signal.SIGTERM, None)

    def pause_within(self, point: str) -> None:
        """A point inside a critical section."""
        player = this_player()
        if player is not None and (not self.atomic or self._signal(player)):
            self.pause(Move(point))

    def work(self, point: str, ready: Callable[[], bool] = lambda: True) -> None:
        """A point of a stage's own work, which only other work can tell from no point."""
        player = this_player()
        assert player is not None
        player.stop(Move(point, ready))

    @contextlib.contextmanager
    def looking_for(self, name: str) -> Iterator[None]:
        """Within, what is read is read for the waiting thread of that name, and is no point."""
        own, self.record, self.watches = self.record, Record(), False
        try:
            yield
        finally:
            own.others.append((name, self.record.touched()))
            self.record, self.watches = own, True

    def touched(self) -> Touched:
        """What was touched since this was last asked."""
        record, self.record = self.record, Record()
        return record.touched()

    def alone(self) -> str:
        """Who goes on alone: who holds a monitor, if sections are atomic."""
        return next((m.owner for m in self.monitors if m.owner), "") if self.atomic else ""

    def forgotten(self) -> list[str]:
        """The threads that a change should have woken and did not."""
        free = [monitor for monitor in self.monitors if not monitor.owner]
        return [w.name for monitor in free for w in monitor.waiters if w.is_forgotten()]

    def _signal(self, player: Player) -> list[Move]:
        due = self.signal_to_come and player.name == MAIN and self.handlers.get(signal.SIGTERM)
        return [Move(SIGNAL)] if due else []

    def _peeking(self, guarded: Mapping[str, str]) -> Callable[[Any, str], Any]:
        """Attribute access, recorded; reading shared state without the monitor is a point."""

        def read(of: Any, name: str) -> Any:
            if name in guarded and (player := this_player()):
                alone = len(player.company) == 1 or self._holds(player.name)
                if self.watches and not alone:
                    self.pause(Move(f"looks at {guarded[name]} unguarded"))
                self.record.looks(of, name, guarded[name])
            return object.__getattribute__(of, name)

        return read

    def _assigning(self, guarded: Mapping[str, str]) -> Callable[[Any, str, Any], None]:
        def assign(of: Any, name: str, value: Any) -> None:
            if name in guarded:
                self.record.writes(named(of, guarded[name]))
            object.__setattr__(of, name, value)

        return assign

    def _holds(self, name: str) -> bool:
        return any(monitor.owner == name for monitor in self.monitors)
