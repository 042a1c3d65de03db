"""Failures of concurrent torch.compile by cures, from the evidence of `fxrace`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diagnostics.reproducers import reproducers

CELL = re.compile(r"(?P<mode>DF\d{3}) (?P<cure>\S+) (?P<moment>.+)")
NO_CURE = "none"
# How bad an outcome is; of the moments at which a cell was tried the worst is shown.
OUTCOMES = ("absent", "measured", "skipped", "cannot tell", "hung", "crashed", "reproduced")


@dataclass(frozen=True)
class HeatMap:
    """The failures with their names; each cell's outcome, and in words what happened."""

    modes: Mapping[str, str]
    cures: list[str]
    cells: Mapping[tuple[str, str], tuple[str, str]]


def heat_map(evidence: Mapping[str, str]) -> HeatMap | None:
    """None where nothing was tried."""
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    for mode, cure, moment, outcome, said in _cells(evidence):
        before = cells.get((mode, cure))
        if before is None or OUTCOMES.index(outcome) > OUTCOMES.index(before[0]):
            cells[mode, cure] = (outcome, f"{moment}: {said}")
    if not cells:
        return None
    cures = list(dict.fromkeys(cure for _, cure in cells))
    cures.sort(key=lambda cure: cure != NO_CURE)
    names = {code: path.stem[6:].replace("_", " ") for code, path in reproducers().items()}
    modes = {mode: names.get(mode, "") for mode in sorted({mode for mode, _ in cells})}
    return HeatMap(modes, cures, cells)


def _cells(evidence: Mapping[str, str]) -> Iterator[tuple[str, str, str, str, str]]:
    for name, value in evidence.items():
        outcome, _, said = value.partition(": ")
        if (found := CELL.fullmatch(name)) and outcome in OUTCOMES:
            yield found["mode"], found["cure"], found["moment"], outcome, said
