"""Watch the FX traces of a process while they are open: the windows in which threads collide."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from dflash.fx_isolation import find, skip


@dataclass
class Window:
    """One trace.

    `seconds` is None while it is open; `lock_held`: its thread had torch's compile lock at entry.
    """

    thread: str
    tracer: str
    lock_held: bool
    opened_s: float
    seconds: float | None = None

    def __str__(self) -> str:
        since = f"{self.seconds:.3f} s" if self.seconds is not None else "open"
        lock = "holds" if self.lock_held else "does not hold"
        return f"{self.thread}: {self.tracer}, {lock} the compile lock, {since}"


@dataclass
class Windows:
    """The traces seen, in the order in which they were opened."""

    seen: list[Window] = field(default_factory=list)

    def open_now(self) -> list[Window]:
        return [window for window in self.seen if window.seconds is None]

    def threads_at_once(self) -> int:
        """The most threads that were seen tracing at the same moment."""
        return max((self._beside(window) for window in self.seen), default=0)

    def _beside(self, one: Window) -> int:
        """Threads with a window open at the moment at which this one was opened."""
        at_s = one.opened_s
        ends = ((other, other.opened_s + (other.seconds or float("inf"))) for other in self.seen)
        return len({other.thread for other, end_s in ends if other.opened_s <= at_s <= end_s})


@contextmanager
def trace_windows(show: Callable[[Window], None] | None = None) -> Iterator[Windows]:
    """See every `torch.fx.Tracer.trace` of every thread while this is open.

    Args:
        show: called in the tracing thread whenever a window closes.
    """
    windows = Windows()
    trace = torch.fx.Tracer.trace

    @functools.wraps(trace)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = threading.current_thread().name
        window = Window(name, type(self).__name__, _lock_is_held(), time.monotonic())
        windows.seen.append(window)
        try:
            return trace(self, *args, **kwargs)
        finally:
            window.seconds = time.monotonic() - window.opened_s
            if show is not None:
                show(window)

    skip(watched)
    torch.fx.Tracer.trace = watched  # type: ignore[method-assign]
    try:
        yield windows
    finally:
        torch.fx.Tracer.trace = trace  # type: ignore[method-assign]


def _lock_is_held() -> bool:
    """By this thread."""
    return bool(find("torch._dynamo.convert_frame", "compile_lock")._is_owned())
