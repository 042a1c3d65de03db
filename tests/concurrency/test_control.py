"""The control: what queue.Queue with sentinels, and closing on error, do in the same situations.

Each test asserts the bad outcome; it fails if the tool that we replaced would have done.
"""

import os
import queue
import threading

import pytest

from dflash.concurrency import ChannelBroken, Scope, channel

TRIALS = 20
N_ITEMS = 12
CAPACITY = 2
SENTINEL = object()
DEADLINE_S = 20.0
STILL_BLOCKED_AFTER_S = 0.02


def dying_consumer(items, at):
    for _ in range(at):
        items.get()


def producer(items):
    for item in range(N_ITEMS):
        items.put(item)
    items.put(SENTINEL)


def drain(items):
    while items.get(timeout=DEADLINE_S) is not SENTINEL:
        pass


def stays_blocked(at):
    """Let the consumer die at item `at`; return whether the producer is stuck in `put`."""
    items = queue.Queue(CAPACITY)
    threads = [
        threading.Thread(target=dying_consumer, args=(items, at), daemon=True),
        threading.Thread(target=producer, args=(items,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    threads[0].join(DEADLINE_S)
    while threads[1].is_alive() and not items.full():
        os.sched_yield()
    threads[1].join(STILL_BLOCKED_AFTER_S)
    # Full, and nobody left who could take an item: it is blocked for ever.
    blocked = not threads[0].is_alive() and threads[1].is_alive()
    drain(items)
    threads[1].join(DEADLINE_S)
    assert not threads[1].is_alive(), "the producer was not released"
    return blocked


def test_queue_leaves_the_producer_blocked_when_the_consumer_dies():
    blocked = sum(stays_blocked(at % (N_ITEMS - CAPACITY)) for at in range(TRIALS))
    print({"trials": TRIALS, "producers_blocked_for_ever": blocked})
    assert blocked == TRIALS


def fail_midway(send, at):
    for item in range(at):
        send(item)
    raise ValueError("injected")


def looks_finished_on_a_queue(at, background):
    """The usual cure: the sentinel in a `finally`."""
    items = queue.Queue(CAPACITY)

    def produce():
        try:
            fail_midway(items.put, at)
        finally:
            items.put(SENTINEL)

    call = background(produce, "producer")
    received = list(iter(lambda: items.get(timeout=DEADLINE_S), SENTINEL))
    assert type(call.join().error) is ValueError
    return len(received) < N_ITEMS


def looks_finished_on_a_channel(at, background, break_on_error):
    sender, receiver = channel(Scope("control"), CAPACITY, "items", timeout_s=DEADLINE_S)

    def produce():
        if break_on_error:
            with sender:
                fail_midway(sender.send, at)
        try:
            fail_midway(sender.send, at)
        finally:
            sender.close()

    call = background(produce, "producer")
    try:
        received = list(receiver)
    except ChannelBroken as broken:
        assert broken.__cause__ is call.join().error
        return False
    return len(received) < N_ITEMS


@pytest.mark.parametrize(
    ("looks_finished", "expected"),
    [
        (looks_finished_on_a_queue, TRIALS),
        (lambda at, bg: looks_finished_on_a_channel(at, bg, break_on_error=False), TRIALS),
        (lambda at, bg: looks_finished_on_a_channel(at, bg, break_on_error=True), 0),
    ],
    ids=["queue, sentinel on error", "channel, close on error", "channel, break on error"],
)
def test_a_truncated_run_looks_finished(looks_finished, expected, background):
    count = sum(looks_finished(at % N_ITEMS, background) for at in range(TRIALS))
    print({"truncated_runs": TRIALS, "look_finished": count})
    assert count == expected
