"""`--fix`: ends leftovers, one question for each; a process that was not named is never ended."""

import os
import select
import signal
from collections.abc import Callable, Sequence

from diagnostics.launch import onsite
from diagnostics.preflight.line import Culprit, Line

ENDS_S = 10.0  # for a process to end once it was told to
Ask = Callable[[str], bool]
Say = Callable[[str], None]


def offer(found: Sequence[Line], ask: Ask, say: Say) -> int:
    """Ask about every culprit; how many have ended."""
    culprits = _once_each(found)
    if not culprits:
        say("nothing to end")
    return sum(_offer(process, does, ask, say) for process, does in culprits)


def _once_each(found: Sequence[Line]) -> list[tuple[Culprit, str]]:
    """With all that each of them does, however many checks it was found by."""
    does: dict[int, list[str]] = {}
    first: dict[int, Culprit] = {}
    for line in found:
        for culprit in line.culprits:
            first.setdefault(culprit.process.pid, culprit)
            does.setdefault(culprit.process.pid, []).append(culprit.does)
    return [(culprit, "; ".join(does[pid])) for pid, culprit in first.items()]


def _offer(culprit: Culprit, does: str, ask: Ask, say: Say) -> bool:
    process = culprit.process
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        say(f"{process.pid} has ended meanwhile")
        return False
    except OSError as error:
        say(f"{process.pid} cannot be reached: {error.strerror}")
        return False
    try:
        # The handle is of the process that has this number now: is it the one that was seen?
        if onsite.stat(process.pid)[19:20] != [str(process.ticks)]:
            say(f"{process.pid} is another process now")
            return False
        if not ask(f"End {culprit.with_all(does)}?"):
            return False
        return _end(handle, process.pid, ask, say)
    finally:
        os.close(handle)


def _end(handle: int, pid: int, ask: Ask, say: Say) -> bool:
    """SIGTERM, which lets a run save; SIGKILL only if that is not enough and after a question."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not _has_ended(handle):
            if not ask(f"{pid} does not end within {ENDS_S:g} s. Kill it, saving nothing?"):
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not _has_ended(handle):
                say(f"{pid} does not even end on SIGKILL: a driver keeps it; restart the machine")
                return False
    except ProcessLookupError:
        pass  # it was quicker
    except PermissionError:
        say(f"you may not end {pid}")
        return False
    say(f"{pid} has ended")
    return True


def _has_ended(handle: int) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(ENDS_S * 1000))
