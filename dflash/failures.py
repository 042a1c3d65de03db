"""What a failed run says last, and the code it exits with."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from dflash.concurrency import StuckThreads
from dflash.errors import DflashError, Exit

log = logging.getLogger(__name__)

MEMORY_IS_FULL = (
    "Lower --token-budget and, for a drafter's GPU, --draft-chunk or --max-draft-positions; "
    "--rehearse tells whether the run fits. See who else is on that GPU: dflash-diag preflight"
)


def reported(run: Callable[[], int]) -> int:
    """The exit code of `run`, or of what it raised, which is logged.

    SIGTERM interrupts it as Ctrl-C does, until `stop.on_signals` takes both.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run()
    except StuckThreads as error:
        leave_stuck(error)
    except KeyboardInterrupt:
        log.error("interrupted during start-up; nothing was trained")
        return Exit.INTERRUPTED
    except Exception as error:
        return report(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def report(error: BaseException) -> int:
    """Log every failure, root cause first, each with its remedy; returns the exit code."""
    leaves = list(_leaves(error))
    for number, leaf in enumerate(leaves, start=1):
        which = "" if len(leaves) == 1 else f" {number} of {len(leaves)}"
        log.error("failure%s\n%s", which, _described(leaf))
        if remedy := _remedy(leaf):
            log.error("what to do: %s", remedy)
    root = leaves[0]
    log.error("FAILED: %s: %s", type(root).__name__, str(root).partition("\n")[0])
    return root.exit_code if isinstance(root, DflashError) else Exit.FAILED


def leave_stuck(error: StuckThreads) -> NoReturn:
    """Report, flush, and end the process: a thread stuck in C cannot be stopped otherwise."""
    if error.__cause__ is not None:
        report(error.__cause__)
    log.error("%s", error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.STUCK)


def _described(error: BaseException) -> str:
    """The traceback; of an error that was foreseen, only its message and notes."""
    if isinstance(error, DflashError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    return "".join(traceback.format_exception(error)).rstrip()


def _remedy(error: BaseException) -> str | None:
    if isinstance(error, torch.OutOfMemoryError):
        return MEMORY_IS_FULL
    return getattr(error, "remedy", None)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error
