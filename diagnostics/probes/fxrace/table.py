"""The table failure by cure: run the cells, show each row as it fills, and conclude."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.reproducers import Outcome, follow, reproducer_dir, reproducers, said
from diagnostics.verdict import Status, Verdict

NO_CURE = "none"
SHIPPED = "shipped"
LATER = "later"
COST = "COST"
CONTROL = "DF000"
QUIET_S = 330.0  # longer than any cell may take
MOMENTS = {"start-up": "  at start-up", "in-compile": "  within a compile"}
WORDS = {
    "BAD": "it happens",
    "fine": "it does not happen here",
    "mask": "the cause is there, and something else hides it",
    "holds": "it happens without the cure, and not with it",
    "no-op": "it happens with the cure as without it",
    "eager": "no error, but compiled code silently runs eager",
    "break": "what works in one thread fails under the cure",
    "HANG": "the threads wait for each other for ever",
    "crash": "the run died",
    "?": "the run could not tell",
    "-": "nothing to cure",
}


@dataclass(frozen=True)
class Cell:
    """One failure under one cure at one moment, and what became of it."""

    code: str
    cure: str
    when: str
    outcome: Outcome
    reason: str
    manner: str = ""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Cell":
        """From a line of repro/cells.py."""
        names = (line["code"], line["cure"], line["when"])
        return cls(*names, Outcome(line["outcome"]), str(line["reason"]), line.get("manner", ""))


@dataclass(frozen=True)
class Report:
    """Every cell that was run on one torch."""

    torch: str
    cells: tuple[Cell, ...]

    def cell(self, code: str, cure: str, when: str) -> Cell | None:
        """None where that cell was not run."""
        same = (c for c in self.cells if (c.code, c.cure, c.when) == (code, cure, when))
        return next(same, None)

    def word(self, code: str, cure: str, when: str) -> str:
        """The cell as the table shows it: a key of `WORDS`, or what was measured."""
        cell = self.cell(code, cure, when)
        if cell is None:
            return ""
        bare = self.cell(code, NO_CURE, when) or self.cell(code, NO_CURE, LATER)
        match cell.outcome:
            case Outcome.MEASURED:
                return cell.reason
            case Outcome.REPRODUCED:
                return _word_for_bad(cell, bare)
            case Outcome.ABSENT:
                return _word_for_absent(cell, bare)
            case Outcome.CANNOT_TELL:
                return "?"
            case Outcome.CRASHED:
                return "crash"
            case Outcome.HUNG:
                return "HANG"

    def reproduced(self) -> list[str]:
        """The failures that happen without a cure, at any moment tried."""
        bare = (c for c in self.cells if c.cure == NO_CURE and c.code != CONTROL)
        return sorted({cell.code for cell in bare if cell.outcome is Outcome.REPRODUCED})

    def holding(self, code: str) -> list[str]:
        """Cures under which a failure that happens here did not happen, at any moment tried."""
        cures = dict.fromkeys(c.cure for c in self.cells if c.code == code and c.cure != NO_CURE)
        return [cure for cure in cures if self._words(code, cure) <= {"holds", "-"}]

    def _words(self, code: str, cure: str) -> set[str]:
        whens = {c.when for c in self.cells if (c.code, c.cure) == (code, cure)}
        return {self.word(code, cure, when) for when in whens}


def _word_for_bad(cell: Cell, bare: Cell | None) -> str:
    if cell.manner == "silent":
        return "eager"
    if cell.code == CONTROL and cell.cure != NO_CURE:
        return "break"
    same = bare is not None and (bare.outcome, bare.reason) == (cell.outcome, cell.reason)
    return "no-op" if same and cell.cure != NO_CURE else "BAD"


def _word_for_absent(cell: Cell, bare: Cell | None) -> str:
    if cell.manner == "masked":
        return "mask"
    if cell.cure == NO_CURE or cell.code == CONTROL:
        return "fine"
    return "holds" if bare is not None and bare.outcome is Outcome.REPRODUCED else "-"


def measure(
    arguments: Sequence[str], show: Callable[[str], None], python: str = sys.executable
) -> Report:
    """Run repro/cells.py in `python`, and show each row of the table as soon as it is complete.

    Every cell has a deadline of its own there. Raises RuntimeError, with the child's last words,
    when it ends before all cells are done.
    """
    table = _Table(show)
    program = reproducer_dir() / "cells.py"
    ended = follow(program, arguments, table.hear, quiet_s=QUIET_S, python=python)
    if table.missing or ended.code != 0:
        raise RuntimeError(f"the reproducers ended early: {ended.how()}")
    table.close()
    return table.report


class _Table:
    """The rows, a cure and a moment each, shown in order as they fill."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.report = Report("unknown", ())
        self.missing: set[tuple[str, ...]] = {("the plan",)}
        self._show = show

    def hear(self, line: str) -> None:
        """A line of repro/cells.py: the plan, then a cell each."""
        if ("the plan",) in self.missing:
            self._plan(said(line))
        else:
            self._add(Cell.of(said(line)))

    def _plan(self, planned: Mapping[str, Any]) -> None:
        cells = [tuple(cell.split(":")) for cell in planned["cells"]]
        self.report = Report(planned["torch"], ())
        self.missing = set(cells)
        self._left_out = planned["left_out"]
        self._codes = list(dict.fromkeys(cell[0] for cell in cells))
        self._rows = iter(list(dict.fromkeys(cell[1:] for cell in cells)))
        self._next = next(self._rows, None)
        self._open()

    def _open(self) -> None:
        for code, path in reproducers().items():
            if code in self._codes:
                self._show(f"{code}  {path.stem[6:].replace('_', ' ')}")
        if COST in self._codes:
            self._show(
                "waits  seconds that three threads stood at locks and gates (see repro/cost.py)"
            )
        heads = ["waits" if code == COST else code for code in self._codes]
        self._show(_row(f"\ntorch {self.report.torch}", heads))

    def _add(self, cell: Cell) -> None:
        self.report = Report(self.report.torch, (*self.report.cells, cell))
        self.missing.discard((cell.code, cell.cure, cell.when))
        while self._next and not any((code, *self._next) in self.missing for code in self._codes):
            cure, when = self._next
            words = [self.report.word(code, cure, when) for code in self._codes]
            title = "no cure" if cure == NO_CURE else cure
            self._show(_row(MOMENTS.get(when, title), words))
            self._next = next(self._rows, None)

    def close(self) -> None:
        """The words that were used, why cells could not tell, and what was not run."""
        cells = self.report.cells
        used = {self.report.word(cell.code, cell.cure, cell.when) for cell in cells}
        self._show("")
        for word, meaning in WORDS.items():
            if word in used:
                self._show(f"{word:<5}  {meaning}")
        for reason in _unclear(cells):
            self._show(reason)
        if self._left_out:
            self._show(f"not run: {', '.join(self._left_out)}, which need CUDA (--device cuda)")


def _row(title: str, words: Sequence[str]) -> str:
    width = 22 + title.startswith("\n")
    return f"{title:<{width}}" + "".join(f"{word:<6}" for word in words).rstrip()


def _unclear(cells: Sequence[Cell]) -> list[str]:
    """Why cells could not tell, each reason once."""
    told = (Outcome.REPRODUCED, Outcome.ABSENT, Outcome.MEASURED)
    unclear = [cell for cell in cells if cell.outcome not in told]
    cures: dict[tuple[str, str], list[str]] = {}
    for cell in unclear:
        title = "no cure" if cell.cure == NO_CURE else cell.cure
        cures.setdefault((cell.code, f"{cell.outcome}: {cell.reason}"), []).append(title)
    return [f"{code} ({', '.join(dict.fromkeys(of))}): {why}" for (code, why), of in cures.items()]


def judge(report: Report) -> Verdict:
    """One sentence: what is broken on this torch, and which cure holds for each of it."""
    modes = [c for c in report.cells if c.cure == NO_CURE and c.code not in (CONTROL, COST)]
    bad = [cell for cell in modes if cell.outcome is not Outcome.ABSENT or cell.manner]
    reproduced = report.reproduced()
    evidence = {f"{c.code} {c.cure} {c.when}": f"{c.outcome}: {c.reason}" for c in report.cells}
    control = report.cell(CONTROL, NO_CURE, LATER)
    if control is not None and control.outcome is not Outcome.ABSENT:
        summary = f"torch {report.torch}: not even a single thread works: {control.reason}"
        return Verdict(Status.UNKNOWN, "concurrent-compile-unknown", summary, evidence)
    if reproduced:
        summary = (
            f"torch {report.torch} has {', '.join(reproduced)}: threads that compile, trace or "
            "draw at the same time disturb each other"
        )
        remedy = "\n  ".join(_remedies(report, reproduced))
        return Verdict(Status.PROBLEM, "concurrent-compile", summary, evidence, remedy)
    if bad:
        summary = f"torch {report.torch}: could not tell for {', '.join(_codes(bad))}"
        return Verdict(Status.UNKNOWN, "concurrent-compile-unknown", summary, evidence)
    summary = f"torch {report.torch} has none of {', '.join(_codes(modes))}"
    return Verdict(Status.OK, "concurrent-compile-absent", summary, evidence)


def _codes(cells: Iterable[Cell]) -> list[str]:
    return sorted({cell.code for cell in cells})


def _remedies(report: Report, codes: Sequence[str]) -> Iterator[str]:
    """One line if the shipped cure holds for all; else a line for each failure."""
    holding = {code: report.holding(code) for code in codes}
    if all(SHIPPED in cures for cures in holding.values()):
        yield (
            "all are cured by: shipped, which `dflash train --compile` applies; for your own "
            "program see docs/fxrace.md"
        )
        return
    for code, cures in holding.items():
        yield f"{code} is cured by: {', '.join(cures) or 'nothing that was tried'}"
