"""Who waits for whom, as trees: what is waited for, and under it those who wait."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Waited:
    """A thread or a thing, and those who wait for it; `again`: in a circle, it stands above."""

    what: str
    by: tuple["Waited", ...] = ()
    again: bool = False

    def names(self) -> set[str]:
        """All in this tree."""
        return {self.what}.union(*(one.names() for one in self.by))


def of(findings: Sequence[Finding]) -> list[Waited]:
    """The trees; none where nobody waits for anybody."""
    waiters = {
        what: [str(finding.thread) for finding in group]
        for what, group in _waiters(findings).items()
    }
    waiting = {name for names in waiters.values() for name in names}
    trees: list[Waited] = []
    for what in sorted(waiters, key=waiting.__contains__):  # those in a circle last
        if not any(what in tree.names() for tree in trees):
            trees.append(_tree(what, waiters))
    return trees


def _tree(what: str, waiters: Mapping[str, list[str]], above: tuple[str, ...] = ()) -> Waited:
    if what in above:
        return Waited(what, again=True)
    by = tuple(_tree(name, waiters, (*above, what)) for name in waiters.get(what, ()))
    return Waited(what, by)


def render(trees: Sequence[Waited]) -> Iterator[str]:
    """Indented lines."""
    for tree in trees:
        yield from _lines(tree, "  ")


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


def _lines(tree: Waited, indent: str, arrow: str = "") -> Iterator[str]:
    yield f"{indent}{arrow}{tree.what}"
    if tree.again:
        yield f"{indent}   ... and so on, in a circle"
    for one in tree.by:
        yield from _lines(one, f"{indent}   ", "<- ")
