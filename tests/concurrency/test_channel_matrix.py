"""Who closed x who was blocked x whether it happened before the call or during it."""

import contextlib

import pytest

from dflash.concurrency import (
    Cancelled,
    ChannelBroken,
    ChannelClosed,
    EndOfChannel,
    Scope,
    channel,
)

GOES_ON = None
BLOCKED_SENDER = "sender on full"
BLOCKED_RECEIVER = "receiver on empty"
FREE_SENDER = "sender with room"
FREE_RECEIVER = "receiver with item"

# "Last" and "one of two" leave out the end under test itself: with that end still open, its own
# side is not gone.
EXPECTED = {
    #                          sender         receiver, empty  receiver, item queued
    "last sender clean":     (GOES_ON,       EndOfChannel,    GOES_ON),
    "sender by exception":   (ChannelBroken, ChannelBroken,   ChannelBroken),
    "one of two senders":    (GOES_ON,       GOES_ON,         GOES_ON),
    "last receiver":         (ChannelBroken, GOES_ON,         GOES_ON),
    "receiver by exception": (ChannelBroken, GOES_ON,         GOES_ON),
    "one of two receivers":  (GOES_ON,       GOES_ON,         GOES_ON),
    "scope cancel":          (Cancelled,     Cancelled,       Cancelled),
    "own end":               (ChannelClosed, ChannelClosed,   ChannelClosed),
}  # fmt: skip
COLUMN = {BLOCKED_SENDER: 0, FREE_SENDER: 0, BLOCKED_RECEIVER: 1, FREE_RECEIVER: 2}
CASES = [
    (event, actor, when)
    for event in EXPECTED
    for actor in COLUMN
    for when in ("before", "while blocked")
    if when == "before" or actor in (BLOCKED_SENDER, BLOCKED_RECEIVER)
]


class Setup:
    """A channel, the end under test (`own`) and the other ends, as the event needs them."""

    def __init__(self, event, actor):
        self.scope = Scope("matrix")
        self.failure = ValueError("injected")
        sender, receiver = channel(self.scope, capacity=1, name="features")
        if actor in (BLOCKED_SENDER, FREE_RECEIVER):
            sender.send("queued")
        self.own = sender if "sender" in actor else receiver
        self.senders = [sender.clone()] if self.own is sender else [sender]
        self.receivers = [receiver.clone()] if self.own is receiver else [receiver]
        if event == "one of two senders":
            self.senders.append(sender.clone())
        if event == "one of two receivers":
            self.receivers.append(receiver.clone())

    def call(self):
        return self.own.send("sent") if hasattr(self.own, "send") else self.own.receive()

    def happen(self, event):
        if event == "scope cancel":
            self.scope.cancel("stop")
        elif event == "own end":
            self.own.close()
        elif event.endswith("by exception"):
            self.leave_by_exception(*(self.senders if "sender" in event else self.receivers))
        else:
            (self.senders if "sender" in event else self.receivers).pop().close()

    def leave_by_exception(self, end):
        with contextlib.suppress(ValueError), end:
            raise self.failure

    def let_go_on(self, actor):
        """Do what the end under test waits for; return what its call should give."""
        if actor == BLOCKED_SENDER:
            assert self.receivers[0].receive() == "queued"
        if actor == BLOCKED_RECEIVER:
            self.senders[0].send("served")
        return {BLOCKED_RECEIVER: "served", FREE_RECEIVER: "queued"}.get(actor)


@pytest.mark.parametrize(("event", "actor", "when"), CASES)
def test_matrix(event, actor, when, background, until_blocked):
    setup = Setup(event, actor)
    if when == "before":
        setup.happen(event)
    call = background(setup.call, actor)
    if when == "while blocked":
        until_blocked(setup.scope)
        setup.happen(event)
    expected = EXPECTED[event][COLUMN[actor]]
    if expected is GOES_ON:
        result = setup.let_go_on(actor)
        call.join()
        assert (call.result, call.error) == (result, None)
    else:
        assert type(call.join().error) is expected
    if event.endswith("by exception") and expected is ChannelBroken:
        assert call.error.__cause__ is setup.failure
        assert "injected" in str(call.error)
