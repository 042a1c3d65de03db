import pytest

from dflash.concurrency import Cancelled, Gate, GateTimeout, Scope, channel

PARTIES = ("drafter-0", "drafter-1")


@pytest.fixture
def scope():
    return Scope("test")


def test_opens_when_all_have_arrived(scope, background, until_blocked):
    gate = Gate(scope, PARTIES, timeout_s=None)
    waiters = [background(gate.wait, f"target-{i}") for i in range(2)]
    until_blocked(scope, threads=2)
    gate.arrive("drafter-1")
    assert not gate.is_open
    assert [party.party for party in gate.missing()] == ["drafter-0"]
    gate.arrive("drafter-0")
    assert [waiter.join().error for waiter in waiters] == [None, None]
    assert gate.is_open
    assert gate.missing() == ()


def test_timeout_names_who_is_missing_its_phase_and_its_stack(scope, background, until_blocked):
    gate = Gate(scope, (*PARTIES, "drafter-2"), timeout_s=0.01)
    sender, receiver = channel(scope, capacity=1, name="weights")

    def compile_for_ever():
        gate.phase("drafter-1", "warm-up, backward, length 2048")
        receiver.receive()

    background(compile_for_ever, "thread-of-drafter-1")
    until_blocked(scope)
    gate.arrive("drafter-0")
    with pytest.raises(GateTimeout) as caught:
        gate.wait()
    sender.send("weights")
    first_line, rest = str(caught.value).split("\n", 1)
    assert "0.01 s for the start-up gate, still missing drafter-1, drafter-2; raise" in first_line
    assert "drafter-1: in 'warm-up, backward, length 2048' for " in rest
    assert "drafter-2: in 'not started' for " in rest
    assert "thread thread-of-drafter-1" in rest
    assert "in compile_for_ever" in rest
    assert "drafter-0" not in str(caught.value)
    warming_up, not_started = caught.value.missing
    assert warming_up.elapsed_s > 0
    assert warming_up.thread.name == "thread-of-drafter-1"
    assert not_started.thread is None


def test_cancelled_while_waiting(scope, background, until_blocked):
    gate = Gate(scope, PARTIES, timeout_s=None)
    waiter = background(gate.wait, "target-0")
    until_blocked(scope)
    scope.cancel("drafter-0 failed")
    assert type(waiter.join().error) is Cancelled
    with pytest.raises(Cancelled):
        gate.arrive("drafter-0")
    with pytest.raises(Cancelled):
        gate.phase("drafter-0", "loading")


def test_cancelled_wins_over_open(scope):
    gate = Gate(scope, (), timeout_s=None)
    gate.wait()
    scope.cancel("stop")
    with pytest.raises(Cancelled):
        gate.wait()


def test_misuse_names_the_party(scope):
    gate = Gate(scope, PARTIES, timeout_s=None)
    gate.arrive("drafter-0")
    with pytest.raises(ValueError, match="'drafter-0' has arrived already"):
        gate.arrive("drafter-0")
    with pytest.raises(ValueError, match="unknown party 'target-0'"):
        gate.phase("target-0", "loading")
    with pytest.raises(ValueError, match="different names"):
        Gate(scope, ("drafter-0", "drafter-0"), timeout_s=None)
