"""What replicas tell each other, and that they notice when they differ."""

import pytest
import torch
from torch import nn

from dflash.concurrency import Cancelled, Scope, TaskGroup, WaitTimeout
from dflash.replicas import Exchange, ReplicasDiverged, check_equal, weights_digest

PARTIES, ROUNDS = 4, 200


def test_everyone_leaves_with_everyones_value_by_rank(tiny_switch_interval):
    got = [[] for _ in range(PARTIES)]

    def work(rank, exchange):
        for r in range(ROUNDS):
            got[rank].append(exchange.gather(rank, (r, rank), "values"))

    with TaskGroup("unit") as group:
        exchange = Exchange(group.scope, PARTIES, timeout_s=30)
        for rank in range(PARTIES):
            group.start(work, rank, exchange, name=f"drafter-{rank}")
    expected = [[(r, rank) for rank in range(PARTIES)] for r in range(ROUNDS)]
    assert got == [expected] * PARTIES


def test_one_party_waits_for_nobody():
    exchange = Exchange(Scope("unit"), 1, timeout_s=0)
    assert exchange.gather(0, "mine", "values") == ["mine"]


def test_a_failure_releases_the_others():
    def fail():
        raise ValueError("out of memory")

    with pytest.raises(ExceptionGroup) as caught, TaskGroup("unit") as group:
        exchange = Exchange(group.scope, 3, timeout_s=None)
        for rank in range(2):
            group.start(exchange.gather, rank, 0, "gradients", name=f"drafter-{rank}")
        group.start(fail, name="drafter-2")
    (root,) = caught.value.exceptions
    assert isinstance(root, ValueError)


def test_a_cancelled_scope_ends_the_wait():
    scope = Scope("unit")
    scope.cancel("enough")
    with pytest.raises(Cancelled, match="enough"):
        Exchange(scope, 2, timeout_s=None).gather(0, 1, "gradients")


def test_a_replica_that_does_not_come_is_named_by_what_it_owes():
    exchange = Exchange(Scope("unit"), 2, timeout_s=0.01)
    with pytest.raises(WaitTimeout, match=r"0\.01 s for the others to bring their digest"):
        exchange.gather(0, "abc", "digest")


def test_the_time_spent_waiting_for_others_is_counted():
    with TaskGroup("unit") as group:
        exchange = Exchange(group.scope, 2, timeout_s=30)
        group.start(exchange.gather, 0, "early", "values", name="drafter-0")
        while not group.scope.waiting:
            pass
        exchange.gather(1, "late", "values")
    assert exchange.waits[0].waited_s > exchange.waits[1].waited_s >= 0.0


def model():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def test_a_digest_changes_with_any_single_bit():
    one, other = model(), model()
    other.load_state_dict(one.state_dict())
    for parameter in other.parameters():
        bits = parameter.data.view(torch.int32).flatten()
        for i in range(len(bits)):
            assert weights_digest(one) == weights_digest(other)
            bits[i] ^= 1
            assert weights_digest(one) != weights_digest(other)
            bits[i] ^= 1


def test_a_digest_tells_minus_zero_and_nan():
    one, other = model(), model()
    for module in (one, other):
        nn.init.zeros_(module[0].weight)
    other.load_state_dict(one.state_dict())
    other[0].weight.data[0, 0] = -0.0
    assert weights_digest(one) != weights_digest(other)


def test_equal_digests_pass():
    check_equal(["a"], step=1)
    check_equal(["a", "a", "a"], step=1)


def test_the_odd_ones_are_named():
    with pytest.raises(ReplicasDiverged, match="step 12: drafter-2 differ") as caught:
        check_equal(["a", "a", "b", "a"], step=12)
    assert "Resume" in caught.value.remedy
