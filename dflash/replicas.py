"""What the drafter replicas of one process tell each other at a step's end."""

import hashlib
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from dflash.concurrency import Scope
from dflash.errors import DflashError
from dflash.heartbeat import waiting

T = TypeVar("T")


class ReplicasDiverged(DflashError):
    """The drafter replicas no longer hold the same weights, bit for bit."""

    remedy = "Resume from the last checkpoint; if it recurs, please report it with the run's log."


@dataclass
class Waited:
    """Seconds that one replica has waited for the others."""

    waited_s: float = 0.0


class Exchange(Generic[T]):
    """All-gather between threads: everyone brings a value and leaves with everyone's, by rank.

    A replica that has failed cancels the scope, which releases the others; one that is stuck makes
    the others' wait end after `timeout_s` seconds with WaitTimeout.
    """

    def __init__(self, scope: Scope, parties: int, timeout_s: float) -> None:
        self.scope = scope
        self.parties = parties
        self.timeout_s = timeout_s
        self.waits = [Waited() for _ in range(parties)]
        self._round = 0
        self._brought: dict[int, T] = {}
        self._result: list[T] = []

    def gather(self, rank: int, value: T, what: str) -> list[T]:
        """Everyone's value of this round; `what` names it in errors. Raises Cancelled."""
        started_s = time.monotonic()
        waiting(f"the others' {what}")
        with self.scope.changed:
            this_round = self._round
            self._brought[rank] = value
            if len(self._brought) == self.parties:
                self._finish_round()
            # _result is this round's until its slowest reader has arrived in the next one.
            self.scope.wait_for(
                lambda: self._round != this_round,
                what=f"the others to bring their {what}",
                timeout_s=self.timeout_s,
            )
            self.waits[rank].waited_s += time.monotonic() - started_s
            return self._result

    def _finish_round(self) -> None:
        self._result = [self._brought[rank] for rank in range(self.parties)]
        self._brought = {}
        self._round += 1
        self.scope.changed.notify_all()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of every weight's bytes, in order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def check_equal(digests: list[str], step: int) -> None:
    """Raise ReplicasDiverged, naming the odd ones, unless all digests are equal."""
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        names = ", ".join(f"drafter-{rank}" for rank in odd)
        raise ReplicasDiverged(f"step {step}: {names} differ(s) from drafter-0")
