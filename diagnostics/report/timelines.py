"""Schedules as timelines: a lane for each thread, a row for each step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timeline:
    """One schedule. `lanes`: each thread's name and role; `steps`: the number of a lane, and what.

    `planted`: the bug that it shows was put in, so that it is found.
    """

    title: str
    lanes: list[tuple[str, str]]
    steps: list[tuple[int, str]]
    preemptions: str
    failure: str
    planted: bool


def timelines(more: Mapping[str, Any]) -> list[Timeline]:
    """Those of the schedules in a search's JSON; what was really found comes first."""
    made = [_timeline(schedule) for schedule in more.get("schedules", ())]
    return sorted(made, key=lambda timeline: timeline.planted)


def _timeline(schedule: Mapping[str, Any]) -> Timeline:
    lanes: dict[str, str] = schedule["lanes"]
    names = list(lanes)
    return Timeline(
        schedule["title"],
        list(lanes.items()),
        [(names.index(thread), point) for thread, point in schedule["steps"]],
        _times(schedule["preemptions"]),
        schedule["failure"],
        schedule["planted"],
    )


def _times(preemptions: int) -> str:
    if preemptions == 1:
        return "a thread is preempted once"
    return f"a thread is preempted {preemptions} times" if preemptions else "no preemption"
