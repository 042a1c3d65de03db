"""Processes that compile side by side and measure by turns, each when nobody compiles.

Those that find the same file in $DFLASH_BENCH_TURNS: see children.side_by_side. Each of them has
$DFLASH_BENCH_LIMIT_S seconds to import and compile, and as many to measure. Import this first: the
limit begins here.
"""

import faulthandler
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from children import LIMIT, TURNS

turns = None


def take_turn(how: int) -> None:
    """Lock the file of turns, and begin our limit: the wait is not ours, but bounded by theirs.

    Past its limit the process ends, and says on stderr where every thread was.
    """
    assert turns is not None
    faulthandler.cancel_dump_traceback_later()
    fcntl.flock(turns, how)
    faulthandler.dump_traceback_later(float(os.environ[LIMIT]), exit=True)


if TURNS in os.environ:
    turns = os.open(os.environ[TURNS], os.O_RDONLY)  # to the end of the process
    take_turn(fcntl.LOCK_SH)


@contextmanager
def alone() -> Iterator[None]:
    """Within, nobody who takes turns compiles or measures."""
    if turns is None:
        yield
        return
    take_turn(fcntl.LOCK_EX)
    try:
        yield
    finally:
        take_turn(fcntl.LOCK_SH)
