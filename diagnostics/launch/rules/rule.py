"""What a rule is, and what it finds. A rule documents itself: its page is made of its fields."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.launch.layers import Launch
from diagnostics.launch.shell import Span


class Severity(StrEnum):
    """What is lost, the worst first."""

    RUN = "loses the run"
    LOG = "loses the log"
    TAIL = "loses the tail"
    STATUS = "hides the status"
    MISLEADS = "misleads"


@dataclass(frozen=True)
class Edit:
    """Put `text` in place of a span; an empty span is an insertion."""

    span: Span
    text: str


def applied(text: str, edits: Iterable[Edit]) -> str:
    """The text with its edits made; one within another is not needed."""
    unique = list(dict.fromkeys(edits))
    outer = [
        edit
        for edit in unique
        if not any(o.span.covers(edit.span) and o.span != edit.span for o in unique)
    ]
    for edit in sorted(outer, key=lambda edit: edit.span.start, reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


@dataclass(frozen=True)
class Hit:
    """One place where a rule applies.

    `what` says what is wrong there, by name; `why` replaces the rule's where more is known. `edits`
    mend it and are offered only if the result, read again, shows that they do. `unknown`: it could
    not be checked, `what` says why and `instead` what to type to find out. `reveals` is the code
    that may come to light once this is mended.
    """

    span: Span
    what: str
    why: str = ""
    edits: tuple[Edit, ...] = ()
    instead: str = ""
    unknown: bool = False
    reveals: str = ""


@dataclass(frozen=True)
class Rule:
    """A stable code, what it means, and how to find it.

    `wrong` and `right` are whole launches, tried by the tests in a directory that holds train.py,
    start.sh and run.sh. `given` says what must be so for `wrong` to be wrong, if it is not always.
    """

    code: str
    title: str
    severity: Severity
    why: str
    wrong: str
    right: str
    ignore: str
    find: Callable[[Launch], Iterator[Hit]]
    given: str = ""


def before(span: Span) -> Span:
    """The empty span in front."""
    return Span(span.source, span.start, span.start)


def behind(span: Span) -> Span:
    """The empty span behind."""
    return Span(span.source, span.end, span.end)
