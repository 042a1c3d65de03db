"""Progress over items of known number: a bar on a terminal, plain lines in a log, on stderr."""

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")
LINES = 10  # of a whole run in a log


def shown(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with what is done and an estimate of the time left. `what` names them."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if console.is_terminal:
        yield from track(items, what, total=total, console=console, transient=True)
        return
    started_s = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if done * LINES // total > (done - 1) * LINES // total:
            left_s = (time.monotonic() - started_s) / done * (total - done)
            console.print(f"{what}: {done} of {total}, {timedelta(seconds=round(left_s))} left")
