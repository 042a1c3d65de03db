"""Bugs planted into dflash.concurrency: the search must find every one, or it proves nothing.

Each is one method of a real class, written a little wrong, or a stage that does two things in the
wrong order.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from unittest import mock

from dflash.concurrency import Gate, Scope, Sender, scope
from dflash.concurrency.scope import Predicate


class MissingNotify(Gate):
    def arrive(self, party: str) -> None:
        with self._scope.changed:
            self._scope.check()
            self._require_missing(party)
            del self._missing[party]


class NotifiesOne(Gate):
    def arrive(self, party: str) -> None:
        with self._scope.changed:
            self._scope.check()
            self._require_missing(party)
            del self._missing[party]
            self._scope.changed.notify()


class CountsCalls(Gate):
    """Counts what it is told, whoever says it."""

    def phase(self, party: str, text: str) -> None:
        self.arrive(party)

    def arrive(self, party: str) -> None:
        with self._scope.changed:
            self._scope.check()
            if self._missing:
                self._missing.popitem()
            self._scope.changed.notify_all()


class ChecksUnguarded(Gate):
    def wait(self) -> None:
        while not self.is_open:
            with self._scope.changed:
                self._scope.check()
                self._scope.changed.wait(self._timeout_s)


class IfInsteadOfWhile(Scope):
    def wait_until(self, predicate: Predicate, timeout_s: float | None = None) -> bool:
        if not predicate():
            self.changed.wait(math.inf if timeout_s is None else timeout_s)
        return True


class ClosesOnError(Sender[object]):
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


@dataclass(frozen=True)
class Bug:
    """`what` is wrong, in which scenario it shows, and the class whose methods it takes."""

    what: str
    scenario: str
    variant: type | None = None
    arrives_first: bool = False
    never_rechecks: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Within, the real classes have it."""
        with ExitStack() as stack:
            if self.variant is not None:
                for name, method in vars(self.variant).items():
                    if isinstance(method, FunctionType):
                        base = self.variant.__mro__[1]
                        stack.enter_context(mock.patch.object(base, name, method))
            if self.never_rechecks:
                forever = mock.patch.object(scope, "_longest_wait_s", lambda: threading.TIMEOUT_MAX)
                stack.enter_context(forever)
            yield


BUGS = {
    "missing-notify": Bug("arriving at the gate wakes nobody", "healthy", MissingNotify),
    "notify-one": Bug("arriving at the gate wakes one thread", "healthy", NotifiesOne),
    "arrive-first": Bug("a drafter arrives before its warm-up", "healthy", arrives_first=True),
    "counts-calls": Bug("the gate counts a thread twice", "healthy", CountsCalls),
    "unguarded-check": Bug(
        "the gate is looked at before the monitor is held", "healthy", ChecksUnguarded
    ),
    "if-not-while": Bug("a wait does not look again when woken", "healthy", IfInsteadOfWhile),
    "close-on-error": Bug("a failing sender closes its channel", "target-raises", ClosesOnError),
    "never-rechecks": Bug(
        "the main thread trusts to be woken from its own signal handler",
        "stop-hangs",
        never_rechecks=True,
    ),
}
