"""What stands in a report: gathered once, redacted here, shown as HTML or as Markdown."""

import datetime
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diagnostics.everything import Probe, Told
from diagnostics.redact import redact
from diagnostics.verdict import Verdict

CELL = re.compile(r"(?P<mode>DF\d{3}) (?P<cure>\S+) (?P<moment>.+)")
NO_CURE = "none"
# How bad an outcome is; of the moments at which a cell was tried the worst is shown.
OUTCOMES = ("absent", "measured", "skipped", "cannot tell", "hung", "crashed", "reproduced")


@dataclass(frozen=True)
class HeatMap:
    """Failures by cures: each cell's outcome, and in words what happened."""

    modes: list[str]
    cures: list[str]
    cells: Mapping[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Content:
    """The whole report. Everything in it is redacted."""

    made: str
    verdict: Verdict
    told: list[Told]
    left_out: list[Probe]
    heat_map: HeatMap | None
    stacks: str
    environment: Mapping[str, Mapping[str, str]]


def gather(
    told: Sequence[Told],
    left_out: Sequence[Probe],
    verdict: Verdict,
    stacks: str,
    environment: Mapping[str, Any],
) -> Content:
    """Redact everything and put it in its place."""
    clean = [Told(one.probe, _clean(one.verdict), one.seconds) for one in told]
    races = next((one for one in clean if one.probe.name == "fxrace"), None)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Content(
        f"{now}, on {platform.system()} {platform.release()}, {platform.machine()}",
        _clean(verdict),
        clean,
        list(left_out),
        _heat_map(races.verdict.evidence) if races else None,
        redact(stacks),
        {
            section: {name: redact(str(value)) for name, value in values.items()}
            for section, values in environment.items()
        },
    )


def _clean(verdict: Verdict) -> Verdict:
    evidence = {redact(name): redact(value) for name, value in verdict.evidence.items()}
    return Verdict(
        verdict.status, verdict.code, redact(verdict.summary), evidence, redact(verdict.remedy)
    )


def _heat_map(evidence: Mapping[str, str]) -> HeatMap | None:
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    for mode, cure, moment, outcome, said in _cells(evidence):
        before = cells.get((mode, cure))
        if before is None or OUTCOMES.index(outcome) > OUTCOMES.index(before[0]):
            cells[mode, cure] = (outcome, f"{moment}: {said}")
    if not cells:
        return None
    cures = list(dict.fromkeys(cure for _, cure in cells))
    cures.sort(key=lambda cure: cure != NO_CURE)
    return HeatMap(sorted({mode for mode, _ in cells}), cures, cells)


def _cells(evidence: Mapping[str, str]) -> Iterator[tuple[str, str, str, str, str]]:
    for name, value in evidence.items():
        outcome, _, said = value.partition(": ")
        if (found := CELL.fullmatch(name)) and outcome in OUTCOMES:
            yield found["mode"], found["cure"], found["moment"], outcome, said
