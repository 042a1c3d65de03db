"""Items routed by index arrive in order, whatever the number of threads."""

import itertools
import random

import pytest

from dflash.concurrency import ChannelBroken, Scope, TaskGroup
from dflash.routing import indices, queue_depth, routes
from dflash.sections import RunConfig


def limits(capacity=1, timeout_s=30.0):
    return RunConfig(output_dir="out", queue_capacity=capacity, stall_timeout_s=timeout_s)


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 10, 3), (7, 19, 4), (5, 5, 2), (3, 4, 5)])
def test_workers_share_the_items_and_each_takes_them_in_order(start, stop, count):
    shares = [list(indices(rank, count, start, stop)) for rank in range(count)]
    assert sorted(itertools.chain(*shares)) == list(range(start, stop))
    for rank, share in enumerate(shares):
        assert share == sorted(share)
        assert all(i % count == rank for i in share)


def test_an_item_goes_to_the_consumer_whose_turn_it_is():
    senders, receivers = routes(Scope("unit"), 2, 3, "items", limits(capacity=4))
    for i in range(12):
        senders[i % 2].send(i, f"item {i}")
    assert [queue_depth([r]) for r in receivers] == [(4, 8)] * 3
    assert queue_depth(receivers) == (12, 24)
    assert [receivers[i % 3].receive(i) for i in range(12)] == [f"item {i}" for i in range(12)]


def test_a_producer_that_ends_early_is_not_a_clean_end():
    senders, receivers = routes(Scope("unit"), 1, 1, "items", limits(capacity=4))
    with senders[0]:
        senders[0].send(0, "only")
    assert receivers[0].receive(0) == "only"
    with pytest.raises(ChannelBroken, match=r"ended before item 1: .*items 0->0"):
        receivers[0].receive(1)


def test_a_failed_producer_breaks_the_channels_to_every_consumer():
    senders, receivers = routes(Scope("unit"), 1, 3, "items", limits())
    with pytest.raises(ValueError, match="bad row"), senders[0]:
        raise ValueError("bad row")
    for i, receiver in enumerate(receivers):
        with pytest.raises(ChannelBroken, match="bad row") as caught:
            receiver.receive(i)
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_consumer_that_left_breaks_its_producers():
    senders, receivers = routes(Scope("unit"), 2, 1, "items", limits())
    with receivers[0]:
        pass
    for i, sender in enumerate(senders):
        with pytest.raises(ChannelBroken, match="last receiver is gone"):
            sender.send(i, "late")


def test_waits_are_added_up():
    senders, receivers = routes(Scope("unit"), 3, 2, "items", limits(capacity=5))
    assert (senders[0].waited_s, receivers[0].waited_s) == (0.0, 0.0)
    assert (senders[0].capacity, receivers[0].capacity) == (10, 15)


def run_pipeline(prefetchers, targets, drafters, capacity, start, stop):
    """Each drafter's items, as (index, by whom): P x T x D threads, joined as in training."""
    received = [[] for _ in range(drafters)]

    def prefetch(rank, output):
        with output:
            for i in indices(rank, prefetchers, start, stop):
                output.send(i, (i, f"prefetch-{rank}"))

    def target(rank, inputs, output):
        with inputs, output:
            for i in indices(rank, targets, start, stop):
                output.send(i, (*inputs.receive(i), f"target-{rank}"))

    def drafter(rank, inputs):
        with inputs:
            for i in indices(rank, drafters, start, stop):
                received[rank].append(inputs.receive(i))

    with TaskGroup("unit") as group:
        first = routes(group.scope, prefetchers, targets, "batches", limits(capacity))
        second = routes(group.scope, targets, drafters, "features", limits(capacity))
        for rank in range(prefetchers):
            group.start(prefetch, rank, first[0][rank], name=f"prefetch-{rank}")
        for rank in range(targets):
            group.start(target, rank, first[1][rank], second[0][rank], name=f"target-{rank}")
        for rank in range(drafters):
            group.start(drafter, rank, second[1][rank], name=f"drafter-{rank}")
    return received


@pytest.mark.parametrize("seed", range(12))
def test_a_whole_pipeline_delivers_every_item_once_and_in_order(seed, tiny_switch_interval):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(3)]
    start = rng.randint(0, 20)
    stop = start + rng.randint(0, 60)
    received = run_pipeline(*sizes, rng.randint(1, 3), start, stop)
    for rank, items in enumerate(received):
        assert items == [
            (i, f"prefetch-{i % sizes[0]}", f"target-{i % sizes[1]}")
            for i in indices(rank, sizes[2], start, stop)
        ]
