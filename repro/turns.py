"""Threads that run by turns: each stops at its *points*, and somebody else says who goes on.

A point is a watched source line, just before it runs, or an operation of a cooperative primitive.
Between two points a thread is alone. Frames of code that is not watched run untraced.

Trap: CPython before 3.13 writes the variables of a traced frame back after each line, the cells of
closures too. Share attributes between the threads, never closure variables that are rebound.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

Watched = Mapping[CodeType, Mapping[int, str]]  # line -> label; {names} in it are the frame's


class Step(NamedTuple):
    """A thread goes on from the point where it stands, to its next one."""

    thread: str
    point: str


class Touched(NamedTuple):
    """What a step did, and what other steps may not have done if their order is not to matter.

    `looks`: what waiting threads, by name, were looked at for meanwhile.
    """

    does: frozenset[str] = frozenset()
    spoilt_by: frozenset[str] = frozenset()
    looks: tuple[tuple[str, Touched], ...] = ()

    def meets(self, other: Touched) -> bool:
        """Whether the order of the two matters."""
        return bool(self.does & other.spoilt_by or other.does & self.spoilt_by)


@dataclass(frozen=True)
class Ended:
    """What a thread's function returned or raised."""

    value: object = None
    error: BaseException | None = None


class Unclear(Exception):
    """A schedule could not be followed to its end, so that it proves nothing."""


class _GivenUp(BaseException):
    """Unwinds a thread of a schedule that is not followed any further."""


def _always() -> bool:
    return True


class Move(NamedTuple):
    """A way to go on from where a thread stands, open while `ready()`.

    With `due_s` it is a timeout: open only while no thread has another way, the earliest first.
    """

    point: str
    ready: Callable[[], bool] = _always
    due_s: float | None = None


_here = threading.local()


def this_player() -> Player | None:
    """The player that the calling thread is, if it runs by turns."""
    return getattr(_here, "player", None)


def wait_until(ready: Callable[[], bool], point: str) -> None:
    """Stop the calling thread at `point`; it is not chosen to go on before `ready()`.

    The building block of cooperative primitives. In a thread that does not run by turns it returns
    at once: a primitive stands on a real one, which cannot block once `ready()` was waited for.
    """
    if player := this_player():
        player.stop(Move(point, ready))


def stop_at(point: str) -> None:
    """Stop the calling thread at `point`, from where it can always go on."""
    wait_until(_always, point)


class CooperativeLock:
    """A re-entrant lock whose waiting thread is seen to wait; elsewhere a plain RLock.

    Time does not pass for threads that run by turns: a timeout never ends there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()
        self._owner: threading.Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.current_thread()
        if self._owner is not me:
            wait_until(lambda: self._owner is None or not blocking, f"takes {self.name}")
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        """Raises RuntimeError in a thread that does not hold the lock."""
        if self._owner is not threading.current_thread():
            raise RuntimeError(f"{self.name} is not held by this thread")
        try:
            if self._depth == 1:
                stop_at(f"releases {self.name}")
        finally:
            self._depth -= 1
            self._owner = self._owner if self._depth else None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Player:
    """One thread, started at once; it does nothing before its first turn.

    `company` is everybody who runs by turns with it: a body may add players of its own.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        watched: Watched,
        company: list[Player] | None = None,
    ) -> None:
        self.name = name
        self.moves = (Move("starts"),)
        self.ended: Ended | None = None
        self.begun = False
        self.out_of_sight = False
        self.company = [] if company is None else company
        self._body = body
        self._lines = {id(code): labels for code, labels in watched.items()}
        # Not semaphores: a turn is handed over in a third of their time.
        self._turn: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._given_up = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def point(self) -> str:
        """Where the thread stands, by the first of its moves."""
        return self.moves[0].point

    def go_on(self, deadline_s: float, point: str = "") -> None:
        """Let the thread take its move of that name, or its first, to its next point or its end.

        Raises `Unclear`, with the thread's stack, if it does neither in time.
        """
        self.begun = True
        self._turn.put(point or self.point)
        try:
            self._back.get(timeout=deadline_s)
        except queue.Empty:
            self.out_of_sight = True
            raise Unclear(
                f"{self.name}, going on from where it {self.point}, came to no point within "
                f"{deadline_s:g} s; it is blocked out of sight, or slow, in\n{self._stack()}"
            ) from None

    def give_up(self, deadline_s: float) -> bool:
        """Unwind the thread; False if it has not ended by the deadline."""
        self._given_up = True
        self._turn.put("")
        self.thread.join(deadline_s)
        return not self.thread.is_alive()

    def stop(self, *moves: Move) -> str:
        """In the thread itself: hand the turn back; when it is given again, the move to take."""
        if not self._given_up:
            self.moves = moves
            self._back.put(None)
            return self._await_turn()
        if not moves[0].ready():  # a cleanup on the way out passes its points, but never waits
            raise _GivenUp
        return moves[0].point

    def _await_turn(self) -> str:
        point = self._turn.get()  # no deadline: whoever made the player gives turns until it ends
        if self._given_up:
            raise _GivenUp
        return point

    def _run(self) -> None:
        _here.player = self
        ended = Ended()
        try:
            self._await_turn()
            if self._lines:
                sys.settrace(self._on_call)
            ended = Ended(self._body())
        except BaseException as error:  # kept: what a thread died of is for others to judge
            ended = Ended(error=error)
        finally:
            sys.settrace(None)
            self.ended = ended
            self._back.put(None)

    def _on_call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._on_line if id(frame.f_code) in self._lines else None

    def _on_line(self, frame: FrameType, event: str, _arg: object) -> Any:
        label = self._lines[id(frame.f_code)].get(frame.f_lineno)
        if event == "line" and label:
            self.stop(Move(label.format_map(frame.f_locals)))
        return self._on_line

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip()
