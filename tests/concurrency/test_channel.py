import pytest

from dflash.concurrency import (
    Cancelled,
    ChannelBroken,
    ChannelClosed,
    EndOfChannel,
    Scope,
    WaitTimeout,
    channel,
)


@pytest.fixture
def scope():
    return Scope("test")


def test_iteration_ends_after_the_last_item(scope):
    sender, receiver = channel(scope, capacity=3, name="batches")
    with sender:
        for item in range(3):
            sender.send(item)
    with receiver:
        assert list(receiver) == [0, 1, 2]
        with pytest.raises(EndOfChannel):
            receiver.receive()


def test_a_break_drops_queued_items(scope):
    sender, receiver = channel(scope, capacity=3, name="batches")
    sender.send("queued")
    sender.break_(ValueError("boom"))
    assert len(receiver) == 0
    with pytest.raises(ChannelBroken, match=r"'batches': a sender failed: ValueError: boom"):
        receiver.receive()


def test_a_sender_left_by_cancelled_is_not_a_clean_end(scope):
    sender, receiver = channel(scope, capacity=1, name="batches")
    with pytest.raises(Cancelled), sender:
        raise Cancelled("of another scope")
    with pytest.raises(ChannelBroken):
        receiver.receive()


def test_the_first_break_counts(scope):
    sender, receiver = channel(scope, capacity=1, name="batches")
    second = sender.clone()
    sender.break_(ValueError("first"))
    second.break_(ValueError("second"))
    with pytest.raises(ChannelBroken, match="first"):
        receiver.receive()


def test_breaking_a_closed_end_does_nothing(scope):
    sender, receiver = channel(scope, capacity=1, name="batches")
    sender.close()
    sender.break_(ValueError("late"))
    assert list(receiver) == []


def test_losing_the_last_receiver_frees_queued_items(scope):
    sender, receiver = channel(scope, capacity=1, name="batches")
    sender.send("large tensor")
    receiver.close()
    assert len(sender) == 0


def test_closing_twice_and_cloning_a_closed_end(scope):
    for end in channel(scope, capacity=1, name="batches"):
        other = end.clone()
        end.close()
        end.close()
        with pytest.raises(ChannelClosed, match="batches"):
            end.clone()
        other.clone()


def test_a_cancelled_scope_wins_over_queued_items(scope):
    sender, receiver = channel(scope, capacity=2, name="batches")
    sender.send("queued")
    scope.cancel("stop", cause := ValueError())
    scope.cancel("too late")
    with pytest.raises(Cancelled, match="stop") as caught:
        receiver.receive()
    assert caught.value.__cause__ is cause
    with pytest.raises(Cancelled):
        sender.send("room")


def test_a_timeout_names_channel_direction_and_depth(scope):
    sender, receiver = channel(scope, capacity=2, name="batches", timeout_s=0.01)
    with pytest.raises(WaitTimeout, match=r"0\.01 s for an item to receive \(0 of 2 .*'batches'"):
        receiver.receive()
    sender.send(1)
    sender.send(2)
    with pytest.raises(WaitTimeout, match=r"room to send \(2 of 2 queued\) in .*'batches'; raise"):
        sender.send(3)
    assert sender.waited_s >= 0.01
    assert len(sender) == len(receiver) == 2


def test_waited_s_includes_the_wait_in_progress(scope, background, until, until_blocked):
    sender, receiver = channel(scope, capacity=1, name="batches")
    background(receiver.receive, "receiver")
    until_blocked(scope)
    until(scope, lambda: receiver.waited_s > 0.001, "a wait being counted")
    sender.send("item")


def test_threads_that_share_an_end(scope, background, until_blocked):
    _, receiver = channel(scope, capacity=1, name="batches")
    calls = [background(receiver.receive, f"receiver-{i}") for i in range(3)]
    until_blocked(scope, threads=3)
    receiver.close()
    assert [type(call.join().error) for call in calls] == [ChannelClosed] * 3


def test_ends_of_an_empty_channel_are_true(scope):
    assert all(channel(scope, capacity=1, name="batches"))


def test_capacity_is_checked(scope):
    with pytest.raises(ValueError, match="'batches': capacity must be at least 1, got 0"):
        channel(scope, capacity=0, name="batches")
