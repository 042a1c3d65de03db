"""Named points of a schedule, which threads reach and wait for: order without sleeping.

Every wait has a deadline. It is there for the day something hangs: a schedule that goes as written
never comes near it, and a standstill of all threads is noticed at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DEADLINE_S = 20.0


class Missed(Exception):
    """A point of the schedule was not reached in time, so the run proves nothing."""


class Standstill(Missed):
    """Every thread waits for another, at least one of them at a lock or a gate: a deadlock."""


def me() -> str:
    return threading.current_thread().name


class Stage:
    """The points reached so far. A thread held up by a cure reaches `<its name> waits`.

    `gate_parties` threads pass a cure's gate together. `waited_s` adds up the seconds that threads
    spent at locks and gates. `missed` is set once all stand still; then every wait raises it.
    """

    def __init__(self, deadline_s: float = DEADLINE_S, gate_parties: int = 2) -> None:
        self.deadline_s = deadline_s
        self.gate_parties = gate_parties
        self.waited_s = 0.0
        self.missed: Missed | None = None
        self._changed = threading.Condition()
        self._points: set[str] = set()
        self._arrived = 0
        self._step_lock = StageLock(self, "the step lock")
        self._acting: set[str] = set()
        self._waiting: dict[str, _Wait] = {}
        self._complete = False

    def enters(self, name: str) -> None:
        with self._changed:
            self._acting.add(name)

    def leaves(self, name: str) -> None:
        with self._changed:
            self._acting.discard(name)
            self._points.add(f"{name} done")
            self._changed.notify_all()

    @contextlib.contextmanager
    def everyone_has_entered(self) -> Iterator[None]:
        """From here on, threads that all wait will wait for ever."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._complete = False

    @contextlib.contextmanager
    def seeing_the_compile_lock(self) -> Iterator[None]:
        """Put a lock in the place of torch's own; Dynamo and cures look it up when they need it."""
        from torch._dynamo import convert_frame

        before = convert_frame.compile_lock
        convert_frame.compile_lock = StageLock(self, "compile_lock")  # type: ignore[assignment]
        try:
            yield
        finally:
            convert_frame.compile_lock = before

    def reach(self, point: str) -> None:
        with self._changed:
            self._points.add(point)
            self._changed.notify_all()

    def reached(self, point: str) -> bool:
        with self._changed:
            return point in self._points

    def wait(self, *points: str) -> None:
        """Return once any of the points is reached; raises `Missed` after the deadline."""
        with self._changed:
            self._wait_for(lambda: not self._points.isdisjoint(points), " or ".join(points))

    def meet(self) -> None:
        """A gate: return once `gate_parties` threads have come here."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self._held_up(lambda: self._arrived >= self.gate_parties, "the gate")

    def hold(self) -> contextlib.AbstractContextManager[Any]:
        """One lock for whole steps."""
        return self._step_lock

    def _held_up(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a lock or a gate, and be seen to wait."""
        if condition():
            return
        started_s = time.monotonic()
        self._points |= {f"{me()} waits", f"{what} awaited"}
        self._changed.notify_all()
        try:
            self._wait_for(condition, what, is_lock=True)
        finally:
            self._points.discard(f"{me()} waits")
            self.waited_s += time.monotonic() - started_s

    def _wait_for(self, condition: Callable[[], bool], what: str, is_lock: bool = False) -> None:
        self._waiting[me()] = _Wait(condition, what, is_lock)
        self._changed.notify_all()  # the others look whether anyone can still go on
        try:
            self._changed.wait_for(lambda: condition() or self._stands_still(), self.deadline_s)
        finally:
            del self._waiting[me()]
        if not condition():
            raise self.missed or Missed(f"{me()} waited {self.deadline_s:g} s for: {what}")

    def _stands_still(self) -> bool:
        """Whether every thread waits, and none for something that has come; final once true."""
        waits = self._waiting.values()
        stuck = self._complete and self._acting <= set(self._waiting)
        if self.missed is None and stuck and not any(wait.condition() for wait in waits):
            names = sorted(self._waiting)
            said = "; ".join(f"{name} waits for {self._waiting[name].what}" for name in names)
            kind = Standstill if any(wait.is_lock for wait in waits) else Missed
            self.missed = kind(f"nobody can go on: {said}")
            self._changed.notify_all()
        return self.missed is not None


@dataclass(frozen=True)
class _Wait:
    condition: Callable[[], bool]
    what: str
    is_lock: bool


class StageLock:
    """A reentrant lock on which the stage sees threads wait; stands in for torch's compile lock."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self._name = stage, name
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> StageLock:
        thread = threading.get_ident()
        with self._stage._changed:
            self._stage._held_up(lambda: self._owner in (None, thread), self._name)
            self._owner = thread
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._stage._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._stage._changed.notify_all()

    def _is_owned(self) -> bool:  # as threading.RLock calls it
        return self._owner == threading.get_ident()


class Worker(threading.Thread):
    """A named thread that keeps what its function returned or raised, and reaches `<name> done`."""

    def __init__(self, name: str, stage: Stage, act: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._stage, self._act = stage, act
        self.value: Any = None
        self.error: BaseException | None = None
        stage.enters(name)

    def run(self) -> None:
        try:
            self.value = self._act()
        except BaseException as error:  # kept: what a thread died of is the finding
            self.error = error
        finally:
            self._stage.leaves(self.name)
