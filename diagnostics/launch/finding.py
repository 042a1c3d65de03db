"""What a mechanism's look at the remains of a launch comes to."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.launch.remains import Output, Process


class Fit(StrEnum):
    """Whether a mechanism can have been at work."""

    FITS = "fits"
    EXCLUDED = "excluded"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """`why` in words; `by`: whose doing; `output`: what can be copied back through it."""

    fit: Fit
    why: str
    by: Process | None = None
    output: Output | None = None


def fits(why: str, by: Process | None = None, output: Output | None = None) -> Finding:
    """It explains what is seen."""
    return Finding(Fit.FITS, why, by, output)


def excluded(why: str) -> Finding:
    """It cannot have been."""
    return Finding(Fit.EXCLUDED, why)


def unknown(why: str) -> Finding:
    """Nobody can say."""
    return Finding(Fit.UNKNOWN, why)


def first(found: Iterator[Finding], otherwise: str) -> Finding:
    """The first, or that it is excluded."""
    return next(found, excluded(otherwise))
