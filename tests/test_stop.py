"""Stopping on request: what a first and a second signal do, before and after the start."""

import signal

import pytest

from dflash.concurrency import Gate, Scope
from dflash.stop import SIGNALS, StopRequest, on_signals


@pytest.fixture
def run():
    """(stop, scope, gate) of a run that has not started yet."""
    scope = Scope("unit")
    return StopRequest(), scope, Gate(scope, ["drafter-0"], 10)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_cancels(run, caplog, number):
    stop, scope, gate = run
    gate.arrive("drafter-0")
    with on_signals(*run):
        signal.raise_signal(number)
        assert stop.is_set() and not scope.cancelled
        assert f"{number.name}: finishing the step, then saving" in caplog.text
        signal.raise_signal(number)
    assert scope.reason == f"{number.name}: stopped without saving"
    assert scope.cause is None and stop.stopped_after is None


@pytest.mark.parametrize("number", SIGNALS)
def test_during_the_start_a_signal_cancels_at_once(run, number):
    stop, scope, _ = run
    with on_signals(*run):
        signal.raise_signal(number)
    assert scope.cancelled and not stop.is_set()


def test_the_handlers_from_before_come_back(run):
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ValueError, match="unit"), on_signals(*run):
        assert [signal.getsignal(number) for number in SIGNALS] != before
        raise ValueError("unit")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_finished_stop_lets_the_other_stages_go(run):
    stop, scope, _ = run
    stop.finish(scope, 12)
    stop.finish(scope, 12)  # every drafter says so
    assert stop.stopped_after == 12
    assert (scope.reason, scope.cause) == ("stopped after step 12", None)
