"""A scope: one monitor and one cancellation for everything that waits together."""

import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from time import monotonic
from typing import ClassVar

Predicate = Callable[[], object]

SIGNAL_RECHECK_S = 1.0


class Cancelled(BaseException):
    """The scope was cancelled. A `BaseException`, so that `except Exception` cannot swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WaitTimeout(Exception):
    """Nothing came of a wait within `timeout_s` seconds."""

    remedy: ClassVar[str] = (
        "raise the timeout option if the other side is merely slow; "
        "otherwise look at the stacks of all threads to see who holds it up"
    )

    def __init__(self, what: str, timeout_s: float, details: str = "") -> None:
        super().__init__(f"waited {timeout_s:g} s for {what}; {self.remedy}{details}")
        self.what = what
        self.timeout_s = timeout_s


class Scope:
    """The monitor that guards the state of every channel and gate made in it.

    Hold `changed` to read or change that state, and `notify_all` after each change. One condition
    for all costs some needless wake-ups, and leaves no wake-up to forget. Scopes do not nest: a
    thread blocked on another scope's channel does not see this one cancelled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Re-entrant (Condition's default): a signal handler may cancel while its thread holds it.
        self.changed = threading.Condition()
        self.waiting = 0
        """Number of threads blocked in this scope now."""
        self.reason: str | None = None
        self.cause: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self.reason is not None

    def cancel(self, reason: str, cause: BaseException | None = None) -> None:
        """Make all that wait or arrive raise `Cancelled(reason)`; only the first call counts.

        `cause` is the failure behind it; without one the cancellation is a stop, not an error.
        """
        with self.changed:
            if not self.cancelled:
                self.reason, self.cause = reason, cause
                self.changed.notify_all()

    def check(self) -> None:
        """Raise `Cancelled` if the scope is cancelled."""
        if self.reason is not None:
            raise Cancelled(self.reason) from self.cause

    def wait_for(self, predicate: Predicate, *, what: str, timeout_s: float | None) -> None:
        """Block until `predicate()` is true; call it with `changed` held.

        Raises `Cancelled`, even where the predicate is true as well, and `WaitTimeout` after
        `timeout_s` seconds (None: never).
        """
        ready = self.wait_until(lambda: self.cancelled or predicate(), timeout_s)
        self.check()
        if not ready and timeout_s is not None:
            raise WaitTimeout(what, timeout_s)

    def wait_until(self, predicate: Predicate, timeout_s: float | None = None) -> bool:
        """Block until `predicate()` is true, cancelled or not; False after `timeout_s` seconds.

        Call it with `changed` held.
        """
        deadline_s = math.inf if timeout_s is None else monotonic() + timeout_s
        self.waiting += 1
        try:
            while not predicate():
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(min(left_s, _longest_wait_s()))
            return True
        finally:
            self.waiting -= 1


def _longest_wait_s() -> float:
    # A signal handler runs in the main thread, maybe after the predicate was found false and
    # before the wait: what it notifies then is not yet waiting. So that thread looks again.
    on_main = threading.current_thread() is threading.main_thread()
    return SIGNAL_RECHECK_S if on_main else threading.TIMEOUT_MAX


def stacks_of(threads: Iterable[threading.Thread]) -> str:
    """Return the Python stack of each thread as it is now, innermost call last."""
    frames = sys._current_frames()
    lines: list[str] = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        stack = traceback.format_stack(frame) if frame else ["  not running\n"]
        lines += f"thread {thread.name} (native id {thread.native_id}):\n", *stack
    return "".join(lines)


def one_line(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
