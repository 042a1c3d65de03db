"""What a probe found: one value, rendered in several ways and turned into an exit code."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Status(StrEnum):
    """`unknown` is never `ok`: a probe that could not look says so."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


WORST_FIRST = (Status.PROBLEM, Status.UNKNOWN, Status.OK)


def worst(statuses: Iterable[Status]) -> Status:
    """A problem, then what could not be checked; `ok` where there are none at all."""
    return min(statuses, key=WORST_FIRST.index, default=Status.OK)


class ProbeExit(IntEnum):
    """Exit codes of `dflash-diag`."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNKNOWN = 3


EXIT_CODES = "Exit codes: 0 nothing wrong, 1 something found, 2 usage, 3 could not check."


@dataclass(frozen=True)
class Verdict:
    """One finding.

    `code` is stable and meant for scripts, `summary` one line for people, `evidence` what was
    seen by name, `remedy` what to type next (empty where there is nothing to do).
    """

    status: Status
    code: str
    summary: str
    evidence: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""

    @property
    def exit_code(self) -> ProbeExit:
        """The exit code of a command whose finding this is."""
        return ProbeExit[self.status.name]
