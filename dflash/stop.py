"""Stopping on request: the first Ctrl-C or SIGTERM saves and leaves, a second leaves at once."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash.concurrency import Gate, Scope

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to stop, and what became of it."""

    def __init__(self) -> None:
        # A plain attribute: a signal handler may not take a lock that the interrupted code holds.
        self._requested = False
        self.stopped_after: int | None = None
        """Steps done when the run stopped and was saved; None if it did not stop on request."""

    def request(self) -> None:
        """Ask the drafters to stop after the step they are in."""
        self._requested = True

    def is_set(self) -> bool:
        """Whether the run was asked to stop."""
        return self._requested

    def finish(self, scope: Scope, steps_done: int) -> None:
        """Let go of all other stages; not an error."""
        self.stopped_after = steps_done
        scope.cancel(f"stopped after step {steps_done}")


@contextmanager
def on_signals(stop: StopRequest, scope: Scope, gate: Gate) -> Iterator[None]:
    """Within, SIGINT and SIGTERM stop the run; during start-up and the second time they cancel it.

    Only from the main thread, which is the one that Python runs signal handlers in.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if stop.is_set() or not gate.is_open:
            scope.cancel(f"{name}: stopped without saving")
        else:
            stop.request()
            log.warning("%s: finishing the step, then saving; once more to leave at once", name)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
