"""A verdict for people, with the last lines of a log below it."""

from dataclasses import replace

from diagnostics.render import text
from diagnostics.verdict import Verdict

LAST_LINES = "last lines"


def render(verdict: Verdict) -> str:
    """As `text.render`, but for the evidence called `last lines`, which gets lines of its own."""
    evidence = dict(verdict.evidence)
    lines = evidence.pop(LAST_LINES, "").splitlines()
    shown = [text.render(replace(verdict, evidence=evidence))]
    return "\n".join([*shown, *([""] if lines else []), *(f"  | {line}" for line in lines)])
