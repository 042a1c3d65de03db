"""The start-up gate: holds the other stages until every party is ready, and says who is not."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic

from dflash.concurrency.scope import Scope, WaitTimeout, stacks_of


@dataclass(frozen=True)
class MissingParty:
    """A party that has not arrived; `since_s` is on the monotonic clock."""

    party: str
    phase: str
    since_s: float
    thread: threading.Thread | None

    @property
    def elapsed_s(self) -> float:
        """Seconds spent in this phase so far."""
        return monotonic() - self.since_s

    def __str__(self) -> str:
        thread = self.thread.name if self.thread else "none yet"
        return f"{self.party}: in {self.phase!r} for {self.elapsed_s:.1f} s (thread {thread})"


class GateTimeout(WaitTimeout):
    """The gate did not open in time; names each missing party, its phase and its stack."""

    def __init__(self, missing: tuple[MissingParty, ...], timeout_s: float) -> None:
        phases = "\n".join(f"  {party}" for party in missing)
        stacks = stacks_of(party.thread for party in missing if party.thread)
        what = f"the start-up gate, still missing {', '.join(party.party for party in missing)}"
        super().__init__(what, timeout_s, details=f"\n{phases}\n{stacks}")
        self.missing = missing


class Gate:
    """Opens once, when every party has arrived."""

    def __init__(self, scope: Scope, parties: Iterable[str], timeout_s: float | None) -> None:
        """Expect `parties`; each `wait` takes at most `timeout_s` seconds (None: no bound).

        Raises `ValueError` if a party is named twice.
        """
        names = tuple(parties)
        now_s = monotonic()
        self._scope = scope
        self._timeout_s = timeout_s
        self._missing = {name: MissingParty(name, "not started", now_s, None) for name in names}
        self._parties = frozenset(names)
        if len(self._parties) < len(names):
            raise ValueError(f"a gate's parties must have different names, got {names}")

    @property
    def is_open(self) -> bool:
        """Whether all have arrived."""
        return not self._missing

    def missing(self) -> tuple[MissingParty, ...]:
        """Return those that have not arrived, in the order they were named."""
        with self._scope.changed:
            return tuple(self._missing.values())

    def phase(self, party: str, text: str) -> None:
        """Record what `party` does from now on, in the calling thread.

        Raises `ValueError` if it is unknown or has arrived; `Cancelled`, so that a long start-up
        stops between two phases.
        """
        with self._scope.changed:
            self._require_missing(party)
            thread = threading.current_thread()
            self._missing[party] = MissingParty(party, text, monotonic(), thread)
            self._scope.check()

    def arrive(self, party: str) -> None:
        """Say that `party` is ready; does not wait.

        Raises `ValueError` if it is unknown or has arrived; `Cancelled`.
        """
        with self._scope.changed:
            self._scope.check()
            self._require_missing(party)
            del self._missing[party]
            self._scope.changed.notify_all()

    def wait(self) -> None:
        """Block until the gate is open. Raises `Cancelled`; `GateTimeout`."""
        with self._scope.changed:
            try:
                self._scope.wait_for(lambda: self.is_open, what="gate", timeout_s=self._timeout_s)
            except WaitTimeout as timeout:
                raise GateTimeout(self.missing(), timeout.timeout_s) from None

    def _require_missing(self, party: str) -> None:
        if party not in self._parties:
            raise ValueError(f"gate: unknown party {party!r}, expected {sorted(self._parties)}")
        if party not in self._missing:
            raise ValueError(f"gate: {party!r} has arrived already")
