"""Forked processes that each do one thing, and may hang, die or be torn without harm to others."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import harness
from turns import Unclear


class Child:
    """Starts at once. Fork before anything starts threads, and before torch._inductor is there."""

    def __init__(self, act: Callable[[], Any], timeout_s: float) -> None:
        context = multiprocessing.get_context("fork")
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(act, sending), daemon=True)
        self._process.start()
        sending.close()

    def answer(self) -> Any:
        """What `act` returned. Raises `Unclear` if it raised or died, or is not done in time."""
        try:
            if not self._receiving.poll(max(0.0, self._deadline_s - time.monotonic())):
                raise Unclear(f"still running after {self._timeout_s:g} s, and killed")
            succeeded, answer = self._receiving.recv()
        except EOFError:
            raise Unclear("its process died") from None
        finally:
            self._process.kill()
            self._process.join()
        if not succeeded:
            raise Unclear(answer)
        return answer


def _run(act: Callable[[], Any], sending: Any) -> None:
    try:
        sending.send((True, act()))
    except Unclear as unclear:
        sending.send((False, str(unclear)))
    except Exception as error:
        sending.send((False, str(harness.described(error))))
