"""Concurrent torch.compile: which failures the installed torch has, and which cure holds."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.reproducers import Outcome, reproducer_dir, reproducers
from diagnostics.verdict import Status, Verdict

NO_CURE = "none"
LATER = "later"
# What a cell says. Only `holds` means that a failure which happens without the cure did not happen.
WORDS = {
    Outcome.REPRODUCED: "BAD",
    Outcome.CANNOT_TELL: "?",
    Outcome.CRASHED: "crash",
    Outcome.HUNG: "HANG",
}


@dataclass(frozen=True)
class Cell:
    """One failure under one cure at one moment, and what became of it."""

    code: str
    cure: str
    when: str
    outcome: Outcome
    reason: str

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Cell":
        """From a line of repro/cells.py."""
        outcome = Outcome(line["outcome"].replace("-", " "))
        return cls(line["code"], line["cure"], line["when"], outcome, str(line["reason"]))


@dataclass(frozen=True)
class Report:
    """Every cell that was run on one torch."""

    torch: str
    cells: tuple[Cell, ...]

    def outcome(self, code: str, cure: str, when: str) -> Outcome | None:
        """None where that cell was not run."""
        same = (c for c in self.cells if (c.code, c.cure, c.when) == (code, cure, when))
        return next((c.outcome for c in same), None)

    def word(self, code: str, cure: str, when: str) -> str:
        """The cell as the table shows it."""
        outcome = self.outcome(code, cure, when)
        if outcome is None:
            return ""
        if outcome is not Outcome.ABSENT:
            return WORDS[outcome]
        if cure == NO_CURE:
            return "absent"
        bare = self.outcome(code, NO_CURE, when) or self.outcome(code, NO_CURE, LATER)
        return "holds" if bare is Outcome.REPRODUCED else "-"

    def holding(self, code: str) -> list[str]:
        """Cures under which a failure that happens here did not happen, at any moment tried."""
        cures = dict.fromkeys(c.cure for c in self.cells if c.code == code and c.cure != NO_CURE)
        return [cure for cure in cures if self._words(code, cure) == {"holds"}]

    def _words(self, code: str, cure: str) -> set[str]:
        whens = {c.when for c in self.cells if (c.code, c.cure) == (code, cure)}
        return {self.word(code, cure, when) for when in whens}


def measure(arguments: Sequence[str], show: Callable[[str], None]) -> Report:
    """Run repro/cells.py and show each row of the table as soon as it is complete.

    Every cell has a deadline of its own there. Raises RuntimeError, with the child's last words,
    when it ends before all cells are done.
    """
    command = [sys.executable, "-W", "ignore", str(reproducer_dir() / "cells.py"), *arguments]
    # A file and not a pipe: torch's warnings would fill a pipe that nobody reads meanwhile.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        table = _Table(child.stdout.readline(), show)
        for line in child.stdout:
            table.add(Cell.of(json.loads(line)))
        if table.missing:
            errors.seek(0)
            raise RuntimeError(f"the reproducers ended early: {_last_line(errors.read())}")
    for reason in _unclear(table.report):
        show(reason)
    return table.report


def _unclear(report: Report) -> list[str]:
    """Why cells could not tell, each reason once."""
    told = (Outcome.REPRODUCED, Outcome.ABSENT)
    cells = [cell for cell in report.cells if cell.outcome not in told]
    return list(dict.fromkeys(f"{c.code}: {c.outcome}: {c.reason}" for c in cells))


class _Table:
    """The rows, a cure and a moment each, shown in order as they fill."""

    def __init__(self, plan: str, show: Callable[[str], None]) -> None:
        """`plan`: the first line of repro/cells.py; empty if it did not get that far."""
        planned = json.loads(plan or '{"torch": "unknown", "cells": [""]}')
        cells = [tuple(cell.split(":")) for cell in planned["cells"]]
        self.report = Report(planned["torch"], ())
        self.missing = set(cells)
        self._codes = sorted({cell[0] for cell in cells})
        self._rows = iter(list(dict.fromkeys(cell[1:] for cell in cells)))
        self._show = show
        self._next = next(self._rows, None)
        if plan:
            names = {code: path.stem[6:] for code, path in reproducers().items()}
            show("\n".join(f"{code}  {names[code].replace('_', ' ')}" for code in self._codes))
            show(f"\n{'torch ' + self.report.torch:<36}" + _row(self._codes))

    def add(self, cell: Cell) -> None:
        self.report = Report(self.report.torch, (*self.report.cells, cell))
        self.missing.discard((cell.code, cell.cure, cell.when))
        while self._next and not any((code, *self._next) in self.missing for code in self._codes):
            self._show(self._filled(*self._next))
            self._next = next(self._rows, None)

    def _filled(self, cure: str, when: str) -> str:
        words = [self.report.word(code, cure, when) for code in self._codes]
        title = "no cure" if cure == NO_CURE else cure
        title += " (start-up)" if when != LATER else ""
        return f"{title:<36}" + _row(words)


def _row(words: Sequence[str]) -> str:
    return "".join(f"{word:<8}" for word in words).rstrip()


def judge(report: Report) -> Verdict:
    """One sentence: what is broken on this torch, and which cure holds for each of it."""
    bare = {c.code: c for c in report.cells if c.cure == NO_CURE and c.when == LATER}
    bad = [code for code, cell in bare.items() if cell.outcome is not Outcome.ABSENT]
    reproduced = [code for code in bad if bare[code].outcome is Outcome.REPRODUCED]
    evidence = {f"{c.code} {c.cure} {c.when}": f"{c.outcome}: {c.reason}" for c in report.cells}
    if reproduced:
        summary = (
            f"torch {report.torch} has {', '.join(sorted(reproduced))}: threads that compile, "
        )
        summary += "trace or draw at the same time disturb each other"
        remedy = "\n  ".join(_cures_of(report, code) for code in sorted(reproduced))
        return Verdict(Status.PROBLEM, "concurrent-compile", summary, evidence, remedy)
    if bad:
        summary = f"torch {report.torch}: could not tell for {', '.join(sorted(bad))}"
        return Verdict(Status.UNKNOWN, "concurrent-compile-unknown", summary, evidence)
    summary = f"torch {report.torch} has none of {', '.join(sorted(bare))}"
    return Verdict(Status.OK, "concurrent-compile-absent", summary, evidence)


def _cures_of(report: Report, code: str) -> str:
    holding = report.holding(code)
    return f"{code} is cured by: {', '.join(holding) or 'nothing that was tried'}"


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def arguments(modes: Sequence[str], cures: Sequence[str], full: bool) -> Iterator[str]:
    """The options of repro/cells.py; `none` is always run, since no cure can be judged without."""
    for mode in modes:
        yield from ("--code", mode)
    for cure in dict.fromkeys((NO_CURE, *cures)) if cures else ():
        yield from ("--cure", cure)
    if full:
        yield "--full"
