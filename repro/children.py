"""Forked processes that each do one thing, and may hang, die or be torn without harm to others."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any

import harness
from turns import Unclear


class Overdue(Unclear):
    """It did not end in time, and was killed."""


class Died(Unclear):
    """It ended without an answer."""


class Child:
    """Starts at once. Fork before anything starts threads, and before torch._inductor is there."""

    def __init__(self, act: Callable[[], Any], timeout_s: float) -> None:
        context = multiprocessing.get_context("fork")
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self.receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(act, sending), daemon=True)
        self._process.start()
        sending.close()

    def remaining_s(self) -> float:
        """Until it is overdue; 0 from then on."""
        return max(0.0, self._deadline_s - time.monotonic())

    def answer(self) -> Any:
        """What `act` returned. Raises `Unclear` if it raised, `Died`, or `Overdue`."""
        try:
            if not self.receiving.poll(self.remaining_s()):
                raise Overdue(f"still running after {self._timeout_s:g} s, and killed")
            succeeded, answer = self.receiving.recv()
        except EOFError:
            self._process.join(self.remaining_s())
            raise Died(f"ended without a word: {self._how()}") from None
        finally:
            self._process.kill()
            self._process.join()
        if not succeeded:
            raise Unclear(answer)
        return answer

    def _how(self) -> str:
        code = self._process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def ended(children: Mapping[str, Child]) -> list[str]:
    """Wait until some child has answered, died or is overdue; returns the names of these."""
    next_s = min(child.remaining_s() for child in children.values())
    ready = connection.wait([child.receiving for child in children.values()], next_s)
    return [
        name
        for name, child in children.items()
        if child.receiving in ready or not child.remaining_s()
    ]


def _run(act: Callable[[], Any], sending: Any) -> None:
    try:
        sending.send((True, act()))
    except Unclear as unclear:
        sending.send((False, str(unclear)))
    except Exception as error:
        sending.send((False, str(harness.described(error))))
