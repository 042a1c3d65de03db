"""Routing by index: item i goes from producer i mod P to consumer i mod C, over its own channel.

Each pair has its own channel, so that items arrive in order and the run repeats with any number of
threads. It cannot deadlock: every stage works in ascending order, so the lowest unfinished item is
always the next one of whoever holds it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Self, TypeVar

from dflash.concurrency import ChannelBroken, EndOfChannel, Receiver, Scope, Sender, channel
from dflash.heartbeat import waiting
from dflash.sections import RunConfig

T = TypeVar("T")
End = TypeVar("End", Sender, Receiver)


class _Ends(Generic[End]):
    """A `with` block over several channel ends, closed or broken together."""

    def __init__(self, ends: Sequence[End]) -> None:
        self._ends: Sequence[End] = ends
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for end in self._ends:
            self._stack.enter_context(end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def waited_s(self) -> float:
        """Seconds spent blocked on these ends."""
        return sum(end.waited_s for end in self._ends)

    @property
    def depth(self) -> int:
        """Items queued in these channels."""
        return sum(len(end) for end in self._ends)

    @property
    def capacity(self) -> int:
        """Items that these channels can hold."""
        return sum(end.capacity for end in self._ends)


class RoutedSender(_Ends[Sender], Generic[T]):
    """One producer's channels to every consumer."""

    def send(self, index: int, item: T) -> None:
        """Send item `index` to the consumer whose turn it is."""
        waiting(f"room for item {index}")
        self._ends[index % len(self._ends)].send(item)


class RoutedReceiver(_Ends[Receiver], Generic[T]):
    """One consumer's channels from every producer."""

    def receive(self, index: int) -> T:
        """Item `index`. Raises ChannelBroken when its producer ended before sending it."""
        waiting(f"item {index}")
        try:
            item: T = self._ends[index % len(self._ends)].receive()
        except EndOfChannel as end:
            raise ChannelBroken(f"ended before item {index}: {end}") from end
        return item


Routes = tuple[list[RoutedSender[T]], list[RoutedReceiver[T]]]


def routes(scope: Scope, producers: int, consumers: int, name: str, limits: RunConfig) -> Routes[T]:
    """Channels from every producer to every consumer: an end of each kind per thread.

    `limits` has the capacity of each channel and the timeout of each wait.
    """
    pairs: dict[tuple[int, int], tuple[Sender[T], Receiver[T]]] = {
        (p, c): channel(
            scope, limits.queue_capacity, f"{name} {p}->{c}", timeout_s=limits.stall_timeout_s
        )
        for p in range(producers)
        for c in range(consumers)
    }
    return (
        [RoutedSender([pairs[p, c][0] for c in range(consumers)]) for p in range(producers)],
        [RoutedReceiver([pairs[p, c][1] for p in range(producers)]) for c in range(consumers)],
    )


def queue_depth(ends: Sequence[RoutedReceiver[T]]) -> tuple[int, int]:
    """Items queued for these consumers, and how many there could be."""
    return sum(end.depth for end in ends), sum(end.capacity for end in ends)


def indices(rank: int, count: int, start: int, stop: int) -> Iterator[int]:
    """The items of worker `rank` of `count`, from `start` up to but without `stop`."""
    return iter(range(start + (rank - start) % count, stop, count))
