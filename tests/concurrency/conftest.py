import os
import threading
import time

import pytest

DEADLINE_S = 20.0


class Call:
    """A call in a thread of its own, whose result or exception is kept."""

    def __init__(self, fn, name):
        self.result = None
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(fn,), name=name, daemon=True)
        self.thread.start()

    def _run(self, fn):
        try:
            self.result = fn()
        except BaseException as error:
            self.error = error

    def join(self):
        self.thread.join(DEADLINE_S)
        if self.thread.is_alive():
            pytest.fail(f"{self.thread.name} hung for {DEADLINE_S:g} s")
        return self


@pytest.fixture
def background():
    """Start a call in the background; at the end of the test all must have returned."""
    calls = []

    def start(fn, name):
        calls.append(Call(fn, name))
        return calls[-1]

    yield start
    for call in calls:
        call.join()


@pytest.fixture
def until():
    """Wait for a condition on a scope's state, evaluated under its monitor."""

    def wait(scope, condition, what):
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            with scope.changed:
                if condition():
                    return
            os.sched_yield()
        pytest.fail(f"{what} did not happen within {DEADLINE_S:g} s")

    return wait


@pytest.fixture
def until_blocked(until):
    def wait(scope, threads=1):
        until(scope, lambda: scope.waiting == threads, f"{threads} threads blocked in {scope.name}")

    return wait
