"""Interleavings that fail, as data: what a search found, for scripts and for the report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diagnostics.verdict import Verdict


@dataclass(frozen=True)
class Schedule:
    """Threads that run by turns, and what is wrong at the end.

    `lanes`: what each thread does, by its name, where that is not plain from the steps. `steps`: a
    thread, and what it does next. `preemptions`: how often the turn was taken from a thread that
    could have gone on. `planted`: a bug was put in so that it is found, to show that the search
    finds.
    """

    title: str
    lanes: Mapping[str, str]
    steps: tuple[tuple[str, str], ...]
    preemptions: int
    failure: str
    planted: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        found: Mapping[str, Any],
        roles: Mapping[str, str] | None = None,
        planted: bool = False,
    ) -> "Schedule":
        """From what repro/timeline.py has of it; the lanes are in the order of `roles`, if any."""
        steps = tuple((thread, point) for thread, point in found["steps"])
        lanes = dict(roles or dict.fromkeys((thread for thread, _ in steps), ""))
        return cls(title, lanes, steps, found["preemptions"], found["failure"], planted)


@dataclass(frozen=True)
class SearchVerdict(Verdict):
    """A verdict with the simplest schedule of each search that found one."""

    schedules: tuple[Schedule, ...] = ()
