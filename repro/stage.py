"""Named points of a schedule, which threads reach and wait for: order without sleeping.

Every wait has a deadline. It is there for the day something hangs: a schedule that goes as written
never comes near it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

DEADLINE_S = 20.0


class Missed(Exception):
    """A point of the schedule was not reached in time, so the run proves nothing."""


def me() -> str:
    return threading.current_thread().name


class Stage:
    """The points reached so far. A thread held up by a cure reaches `<its name> waits`."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._changed = threading.Condition()
        self._points: set[str] = set()
        self._arrived: list[str] = []
        self._owner: str | None = None

    def reach(self, point: str) -> None:
        with self._changed:
            self._points.add(point)
            self._changed.notify_all()

    def wait(self, *points: str) -> None:
        """Return once any of the points is reached; raises `Missed` after the deadline."""
        with self._changed:
            self._wait_for(lambda: not self._points.isdisjoint(points), " or ".join(points))

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(condition, self.deadline_s):
            raise Missed(f"{me()} waited {self.deadline_s:g} s for: {what}")

    def meet(self, parties: int) -> None:
        """A gate: return once `parties` threads have come here."""
        with self._changed:
            self._arrived.append(me())
            if len(self._arrived) >= parties:
                self._points -= {f"{name} waits" for name in self._arrived}
            else:
                self._points.add(f"{me()} waits")
            self._changed.notify_all()
            self._wait_for(lambda: len(self._arrived) >= parties, "the gate")

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """One lock, whose waiting threads can be seen."""
        with self._changed:
            if self._owner is not None:
                self._points.add(f"{me()} waits")
                self._changed.notify_all()
            self._wait_for(lambda: self._owner is None, "the step lock")
            self._points.discard(f"{me()} waits")
            self._owner = me()
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def holding(self, lock: Any) -> Iterator[None]:
        """Hold torch's own lock, and be seen to wait for it."""
        if not lock.acquire(blocking=False):
            self.reach(f"{me()} waits")
            if not lock.acquire(timeout=self.deadline_s):
                raise Missed(f"{me()} waited {self.deadline_s:g} s for {lock!r}")
            with self._changed:
                self._points.discard(f"{me()} waits")
        try:
            yield
        finally:
            lock.release()


class Worker(threading.Thread):
    """A named thread that keeps what its function returned or raised, and reaches `<name> done`."""

    def __init__(self, name: str, stage: Stage, act: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._stage, self._act = stage, act
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._act()
        except BaseException as error:  # kept: what a thread died of is the finding
            self.error = error
        finally:
            self._stage.reach(f"{self.name} done")
