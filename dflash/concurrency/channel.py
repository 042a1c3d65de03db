"""Bounded channels between threads that tell finished, broken and cancelled apart.

An end is a context manager. Give each thread its own, by `clone`: closing one that threads share
closes it for all of them.

    sender, receiver = channel(group.scope, capacity=4, name="features")
    group.start(produce, sender, name="target-0")       # with sender: sender.send(features)
    group.start(consume, receiver, name="drafter-0")    # with receiver: for features in receiver

An end that is dropped without `close` stays open: the other side goes on waiting for it, up to its
timeout. There is no closing by garbage collection, which would make a lost end a clean one.
"""

from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Self, TypeVar

from dflash.concurrency.scope import Predicate, Scope, one_line

T = TypeVar("T")


class ChannelBroken(Exception):
    """The other side is gone without a clean end; `__cause__` is the failure, where there is one.

    Usually a consequence: look for the error of the thread at the other end.
    """


class ChannelClosed(Exception):
    """This end was used after it was closed: a mistake of the caller."""


class EndOfChannel(Exception):
    """Every sender has closed cleanly and all items have been received."""


@dataclass(eq=False)
class _Channel(Generic[T]):
    """What the ends share; guarded by `scope.changed`."""

    scope: Scope
    capacity: int
    name: str
    timeout_s: float | None
    items: deque[T] = field(default_factory=deque)
    senders: set["_End[T]"] = field(default_factory=set)
    receivers: set["_End[T]"] = field(default_factory=set)
    broken: str | None = None
    cause: BaseException | None = None

    def break_(self, why: str, cause: BaseException | None) -> None:
        if self.broken is None:
            self.broken = f"{why}: {one_line(cause)}" if cause is not None else why
            self.cause = cause
            self.items.clear()


class _End(Generic[T]):
    """One side's handle, open as long as it is among its `peers`.

    `name` is the channel's, `capacity` the number of queued items at which `send` blocks, and `len`
    the number queued now.
    """

    def __init__(self, channel: _Channel[T], peers: set["_End[T]"]) -> None:
        self.name = channel.name
        self.capacity = channel.capacity
        self._channel = channel
        self._peers = peers
        self._waited_s = 0.0
        self._blocked_since_s: list[float] = []  # several, if threads share this end
        peers.add(self)

    @property
    def waited_s(self) -> float:
        """Seconds this end has spent blocked, the wait it is in now included; for any thread."""
        with self._channel.scope.changed:
            now_s = monotonic()
            return self._waited_s + sum(now_s - since_s for since_s in self._blocked_since_s)

    def __len__(self) -> int:
        return len(self._channel.items)

    def __bool__(self) -> bool:
        return True  # an end of an empty channel is still an end

    def clone(self) -> Self:
        """Return one more end of this side, for another thread.

        Raises `ChannelClosed` if this one is closed.
        """
        with self._channel.scope.changed:
            self._require_open()
            return type(self)(self._channel, self._peers)

    def close(self) -> None:
        """Leave the channel cleanly. Closing again does nothing."""
        self._leave(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        with self._channel.scope.changed:
            if self in self._peers:
                self._peers.remove(self)
                self._after_leaving(error)
                self._channel.scope.changed.notify_all()

    def _after_leaving(self, error: BaseException | None) -> None:
        raise NotImplementedError

    def _require_open(self) -> None:
        if self not in self._peers:
            raise ChannelClosed(f"this end of channel {self.name!r} is closed")

    def _wait_for(self, ready: Predicate, what: str) -> None:
        """Block until `ready`; raise if this end is closed or the channel broken by then."""
        channel = self._channel
        since_s = monotonic()
        self._blocked_since_s.append(since_s)
        try:
            channel.scope.wait_for(
                lambda: self not in self._peers or channel.broken or ready(),
                what=f"{what} channel {self.name!r}",
                timeout_s=channel.timeout_s,
            )
        finally:
            self._blocked_since_s.remove(since_s)
            self._waited_s += monotonic() - since_s
        self._require_open()
        if channel.broken:
            raise ChannelBroken(f"channel {self.name!r}: {channel.broken}") from channel.cause


class Sender(_End[T]):
    """The sending end; the channel ends when every sender is closed.

    Leaving its `with` closes it; leaving by an exception breaks the channel (see `break_`).
    """

    def send(self, item: T) -> None:
        """Queue `item`, blocking while the channel is full.

        Raises `Cancelled`; `ChannelClosed` if this end is closed; `ChannelBroken` if the last
        receiver is gone or another sender failed; `WaitTimeout`.
        """
        channel = self._channel
        size = channel.capacity
        with channel.scope.changed:
            self._wait_for(
                lambda: len(channel.items) < size, f"room to send ({size} of {size} queued) in"
            )
            channel.items.append(item)
            channel.scope.changed.notify_all()

    def break_(self, cause: BaseException) -> None:
        """Close this end as failed: all other ends get `ChannelBroken` from `cause`.

        Items still queued are dropped, and the break is seen at once: a broken run must not look
        like progress. Does nothing if this end is closed.
        """
        self._leave(cause)

    def _after_leaving(self, error: BaseException | None) -> None:
        if error is not None:
            self._channel.break_("a sender failed", error)


class Receiver(_End[T]):
    """The receiving end, an iterator; each item goes to one of the receivers.

    When the last one is closed, or leaves its `with`, senders get `ChannelBroken`, from the
    exception that it left by, if any.
    """

    def receive(self) -> T:
        """Return the next item, blocking while there is none.

        Raises `EndOfChannel` after the last item; `Cancelled`; `ChannelClosed` if this end is
        closed; `ChannelBroken` if a sender failed, even if items were queued; `WaitTimeout`.
        """
        channel = self._channel
        with channel.scope.changed:
            self._wait_for(
                lambda: channel.items or not channel.senders,
                f"an item to receive (0 of {channel.capacity} queued) from",
            )
            if not channel.items:
                raise EndOfChannel(f"channel {self.name!r} has ended")
            channel.scope.changed.notify_all()
            return channel.items.popleft()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            return self.receive()
        except EndOfChannel:
            raise StopIteration from None

    def _after_leaving(self, error: BaseException | None) -> None:
        if not self._peers:
            self._channel.break_("the last receiver is gone", error)


def channel(
    scope: Scope, capacity: int, name: str, timeout_s: float | None = None
) -> tuple[Sender[T], Receiver[T]]:
    """Make a channel for `capacity` items; each wait lasts at most `timeout_s` (None: no bound).

    Raises `ValueError` if the capacity is below 1.
    """
    if capacity < 1:
        raise ValueError(f"channel {name!r}: capacity must be at least 1, got {capacity}")
    ends: _Channel[T] = _Channel(scope, capacity, name, timeout_s)
    return Sender(ends, ends.senders), Receiver(ends, ends.receivers)
