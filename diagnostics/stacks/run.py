"""What a run's heartbeat adds to its stacks: what each loop works on, and what happened last."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diagnostics.stacks.seen import Section, StacksVerdict, with_details
from diagnostics.stacks.states import Finding
from diagnostics.verdict import Status, Verdict

if TYPE_CHECKING:  # not at import: another distribution may own that name
    from dflash.heartbeat import Loop, Snapshot

EVENTS_SHOWN = 30


def with_loops(verdict: Verdict, beats: Snapshot, findings: Sequence[Finding]) -> Verdict:
    """The verdict with the loops in it; one past its limit is the finding, whatever else is."""
    now_s = time.monotonic()
    evidence = {**{loop.name: _said(loop, now_s) for loop in beats.loops}, **verdict.evidence}
    late = _late(beats, now_s)
    if not late:
        return replace(verdict, evidence=evidence)
    past = ", ".join(
        f"{loop.name} ({loop.phase!r}, {loop.elapsed_s(now_s):.0f} s)" for loop in late
    )
    if verdict.status is Status.PROBLEM:  # why, which the loops themselves cannot say
        summary = f"{verdict.summary}; past their limit: {past}"
        return replace(verdict, summary=summary, evidence=evidence)
    first = late[0]
    state = next((f.said for f in findings if str(f.thread) == first.name), "")
    stands = f": it {state}" if state else ""
    waiting = [loop.name for loop in beats.loops if loop.phase.startswith("waits for")]
    rest = f"; {', '.join(waiting)} wait(s)" if waiting else ""
    return Verdict(
        Status.PROBLEM,
        "loop-stuck",
        f"{first.name} has been at {first.phase!r} for {first.elapsed_s(now_s):.0f} s, limit "
        f"{first.limit_s:g} s{stands}{rest}",
        evidence,
        verdict.remedy,
    )


def overdue(beats: Snapshot) -> list[str]:
    """The loops that are past their limit, the first of them first."""
    return [loop.name for loop in _late(beats, time.monotonic())]


def _late(beats: Snapshot, now_s: float) -> list[Loop]:
    return sorted((o for o in beats.loops if o.is_overdue(now_s)), key=lambda o: o.since_s)


def loop_lines(beats: Snapshot) -> Section:
    """What each loop works on, and since when."""
    now_s = time.monotonic()
    width = max(len(loop.name) for loop in beats.loops)
    lines = [f"  {loop.name:<{width}}  {_said(loop, now_s)}" for loop in beats.loops]
    return Section("loops of the run", tuple(lines))


def after_death(beats: Snapshot) -> StacksVerdict:
    """What its loops did last. A run that came to its end has ended them all."""
    open_loops = [loop for loop in beats.loops if loop.phase not in ("ended", "not started")]
    last_s = max((event.at_s for event in beats.events), default=beats.monotonic_s)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(beats.at(last_s)))
    evidence = {loop.name: loop.phase for loop in beats.loops}
    if not open_loops:
        summary = f"process {beats.pid} has ended; so had all of its loops, at {when}"
        verdict = Verdict(Status.OK, "run-ended", summary, evidence)
    else:
        doing = "; ".join(f"{loop.name}: {loop.phase}" for loop in open_loops)
        summary = f"process {beats.pid} died in the middle of its work, last seen {when}. {doing}"
        remedy = "Look for SIGKILL in the kernel's log (dmesg); go on with --resume auto."
        verdict = Verdict(Status.PROBLEM, "run-died", summary, evidence, remedy)
    return with_details(verdict, sections=_last_events(beats, last_s))


def _last_events(beats: Snapshot, last_s: float) -> Iterator[Section]:
    events = beats.events[-EVENTS_SHOWN:]
    lines = (f"  {e.at_s - last_s:8.3f} s  {e.loop:<12}  {e.text}" for e in events)
    if events:
        title = f"its last {len(events)} events" if len(events) > 1 else "its last event"
        yield Section(title, tuple(lines))


def _said(loop: Loop, now_s: float) -> str:
    limit = f" of at most {loop.limit_s:g}" if loop.has_limit else ""
    return f"{loop.phase}, {loop.elapsed_s(now_s):.1f} s{limit}"
