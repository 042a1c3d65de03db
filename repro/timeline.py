"""A schedule as people read it: time goes down, each thread has its column."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from interleavings import Schedule

WIDTH = 100
NUMBER = 5
SHOWN = 2  # first and last steps of a run of steps that are shown; those between are counted


def timeline(schedule: Schedule, roles: Mapping[str, str]) -> Iterator[str]:
    """The lines; `roles` says for each thread, by name, what it does. None is wider than WIDTH."""
    names = list(roles)
    width = (WIDTH - NUMBER) // len(names) - 2
    rule = "-" * width
    yield _row("", [f"{name} {roles[name]}" for name in names], width)
    yield _row("", [rule for _ in names], width)
    for number, name, text in _lines(schedule):
        yield _row(number, [text if name == column else "" for column in names], width)
    yield from textwrap.wrap(f"=> {schedule.failure or 'nothing is wrong'}", WIDTH)


def steps_in_lanes(schedule: Schedule) -> Iterator[str]:
    """The lines for more threads than there is room for columns: each has a lane."""
    names = list(dict.fromkeys(step.thread for step in schedule.steps))
    for number, step in enumerate(schedule.steps, start=1):
        lane = "  " * names.index(step.thread)
        yield f"{number:>3}  {lane}{step.thread:<12} {step.point}"[:WIDTH].rstrip()
    yield from textwrap.wrap(f"=> {schedule.failure or 'nothing is wrong'}", WIDTH)


def as_data(schedule: Schedule | None) -> dict[str, Any] | None:
    """For a JSON line: the steps, each a thread and its point, and what is wrong at the end."""
    if schedule is None:
        return None
    return {
        **{"steps": schedule.steps, "preemptions": schedule.preemptions},
        "failure": schedule.failure,
    }


def _lines(schedule: Schedule) -> Iterator[tuple[str, str, str]]:
    """Number, thread, text; a long run of one thread's steps is cut in its middle."""
    numbered = enumerate(schedule.steps, start=1)
    for name, run in groupby(numbered, key=lambda item: item[1].thread):
        steps = [(str(number), name, step.point) for number, step in run]
        hidden = len(steps) - 2 * SHOWN
        if hidden < 2:
            yield from steps
            continue
        yield from steps[:SHOWN]
        yield "", name, f"... {hidden} steps more"
        yield from steps[-SHOWN:]


def _row(number: str, cells: list[str], width: int) -> str:
    return "".join([f"{number:>3}  ", *(f"{cell[:width]:<{width + 2}}" for cell in cells)]).rstrip()
