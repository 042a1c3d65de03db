"""Who waits for whom, as an indented tree: what is waited for, and under it those who wait."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from diagnostics.stacks.states import Finding, State

GROUPED = {
    State.QUEUE_FULL: "room in a queue",
    State.QUEUE_EMPTY: "an item in a queue",
    State.QUEUE_JOIN: "a queue's items to be done",
    State.BARRIER: "a barrier",
    State.EVENT: "an event",
    State.SEMAPHORE: "a semaphore",
    State.CONDITION: "a condition",
    State.LOCK: "locks, which keep no owner",
    State.AWAITS_AUTOGRAD: "autograd's thread of the device",
    State.COMPILE_AWAITS_AUTOGRAD: "autograd's thread of the device",
}


def render(findings: Sequence[Finding]) -> list[str]:
    """Lines; none where nobody waits for anybody."""
    waiters = _waiters(findings)
    waiting = {str(f.thread) for group in waiters.values() for f in group}
    lines: list[str] = []
    for what in sorted(waiters, key=waiting.__contains__):  # those in a circle last
        if not any(line.endswith(f" {what}") for line in lines):
            lines += _lines(what, waiters, "  ")
    return lines


def _waiters(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """What is waited for (a thread's name or a thing) -> who waits for it."""
    names = {f.thread.tid: str(f.thread) for f in findings}
    objects = {f.thread.object_id: str(f.thread) for f in findings if f.thread.object_id}
    holder = next((str(f.thread) for f in findings if f.state in COMPILING), None)
    waiters: dict[tuple[str, int | None], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.state is State.JOIN:
            waiters[objects.get(finding.object_id or 0, "a thread that is gone"), None].append(
                finding
            )
        elif finding.state is State.MUTEX:
            owner = finding.thread.kernel.mutex_owner
            waiters[names.get(owner or 0, f"thread {owner}"), None].append(finding)
        elif finding.state is State.AWAITS_COMPILE_LOCK:
            waiters[holder or "the compile lock", None].append(finding)
        elif what := GROUPED.get(finding.state):
            waiters[what, finding.object_id].append(finding)
    merged: dict[str, list[Finding]] = {}
    for (what, _), group in waiters.items():
        label, number = what, 2
        while label in merged:  # another queue, another event
            label, number = f"{what} #{number}", number + 1
        merged[label] = group
    return merged


COMPILING = (State.COMPILES, State.COMPILE_AWAITS_AUTOGRAD)


def _lines(
    what: str, waiters: dict[str, list[Finding]], indent: str, above: tuple[str, ...] = ()
) -> Iterator[str]:
    yield f"{indent}{'<- ' if above else ''}{what}"
    if what in above:
        yield f"{indent}   ... and so on, in a circle"
        return
    for finding in waiters.get(what, ()):
        yield from _lines(str(finding.thread), waiters, f"{indent}   ", (*above, what))
