"""`dflash compare A B`: what two runs have in common, and the first step at which they part.

Reads what a run leaves in its output directory: run.toml, manifest.json, metrics.jsonl. Steps that
only one of them has are left out, so that a run's first minutes can be held against an earlier run.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dflash.config import TrainConfig, changed_options, determining_options
from dflash.errors import DataError

# In the order of cause and effect: the first of them that differs is the one to look at.
EXACT = ("epoch", "batches", "tokens", "draft_positions", "lr", "noise")
MEASURED = ("loss", "ce", "kl", "cap", "grad_norm", "acceptance_length")
Rows = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """Two values of one thing."""

    what: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.what}: {_short(self.a)} | {_short(self.b)}"


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        options: options that determine the weights and differ.
        environment: code and versions that differ; they excuse nothing and condemn nothing.
        steps: how many steps both runs have. first_step: the first of them that differs, if any.
        at_step: what differs there, causes before effects.
        largest: the largest relative difference of each measured column over the common steps.
        speed: per run, median tokens/s, seconds from the start to the first step, acceptance at the
            last common step.
    """

    options: list[Difference]
    environment: list[Difference]
    steps: int
    first_step: int | None
    at_step: list[Difference]
    largest: dict[str, float]
    speed: list[Difference]

    @property
    def same(self) -> bool:
        """Whether options and all common steps agree, and there is a common step."""
        return not self.options and self.first_step is None and self.steps > 0

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps({"same": self.same, **asdict(self)}, indent=2)

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield from (f"option       {difference}" for difference in self.options)
        yield from (f"environment  {difference}" for difference in self.environment)
        yield from (f"speed        {difference}" for difference in self.speed)
        for column, relative in self.largest.items():
            if relative:
                yield f"largest      {column}: {relative:.2g} relative"
        if self.first_step is not None:
            yield from (f"step {self.first_step:<7} {difference}" for difference in self.at_step)
        yield self._verdict()

    def _verdict(self) -> str:
        if not self.steps:
            return "DIFFERENT: no step that both have"
        if self.first_step is not None:
            return f"DIFFERENT from step {self.first_step} on, first in {self.at_step[0].what}"
        if self.options:
            return f"DIFFERENT in {len(self.options)} option(s); the {self.steps} steps agree"
        return f"same: {self.steps} steps"


def compare(a: Path, b: Path, tolerance: float) -> Comparison:
    """Hold two output directories against each other.

    Measured columns may differ by `tolerance`, relative to the larger value. Raises DataError where
    a directory is not one that a run left.
    """
    rows_a, rows_b = read_metrics(a), read_metrics(b)
    steps = sorted(rows_a.keys() & rows_b.keys())
    first = next((s for s in steps if _differing(rows_a[s], rows_b[s], tolerance)), None)
    return Comparison(
        options=_options(a, b),
        environment=list(_differences(_read_json(a), _read_json(b))),
        steps=len(steps),
        first_step=first,
        at_step=[] if first is None else _differing(rows_a[first], rows_b[first], tolerance),
        largest={
            column: max((_relative(rows_a[s][column], rows_b[s][column]) for s in steps), default=0)
            for column in MEASURED
        },
        speed=_speed(rows_a, rows_b, steps),
    )


def _options(a: Path, b: Path) -> list[Difference]:
    nested = [determining_options(TrainConfig.from_toml(_file(run, "run.toml"))) for run in (a, b)]
    return [Difference(f"--{key}", old, new) for _, key, old, new in changed_options(*nested)]


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield Difference(key, a.get(key), b.get(key))


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], tolerance: float) -> list[Difference]:
    limits = {**dict.fromkeys(EXACT, 0.0), **dict.fromkeys(MEASURED, tolerance)}
    return [
        Difference(column, a[column], b[column])
        for column, limit in limits.items()
        if _relative(a[column], b[column]) > limit
    ]


def _relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; infinite where only one of them is a number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    relative = abs(a - b) / max(abs(a), abs(b))
    return math.inf if math.isnan(relative) else relative


def _speed(a: Rows, b: Rows, steps: list[int]) -> list[Difference]:
    def row(what: str, measure: Any) -> Difference:
        return Difference(what, *(round(measure(rows), 3) for rows in (a, b)))

    if not steps:
        return []
    return [
        row("median tokens/s", lambda rows: median(rows[s]["tokens_per_s"] for s in steps)),
        row("seconds to the first step", _seconds_to_start),
        row(
            "acceptance at the last common step", lambda rows: rows[steps[-1]]["acceptance_length"]
        ),
    ]


def _seconds_to_start(rows: Rows) -> float:
    first = rows[min(rows)]
    return float(first["elapsed_s"] - first["seconds"])


def read_metrics(run: Path) -> Rows:
    """Step -> metrics of an output directory; of a step that a resumed run repeated, the last."""
    path = _file(run, "metrics.jsonl")
    lines = path.read_bytes().split(b"\n")
    rows: Rows = {}
    for number, line in enumerate(lines[:-1], start=1):  # a torn line has no newline after it
        try:
            row = json.loads(line)
            rows[row["step"]] = row
            _ = [row[column] for column in (*EXACT, *MEASURED, "tokens_per_s", "elapsed_s")]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}: line {number} is not a step's metrics of this version ({error!r})",
                remedy="Compare runs of one version of dflash-diag.",
            ) from error
    return rows


def _read_json(run: Path) -> dict[str, Any]:
    path = _file(run, "manifest.json")
    try:
        manifest = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}", remedy="Restore it.") from error
    # It follows from the options, which are compared one by one.
    return {key: value for key, value in manifest.items() if key != "config_hash"}


def _file(run: Path, name: str) -> Path:
    path = run / name
    if not path.is_file():
        raise DataError(
            f"{run}: no {name}, so not a directory that a run left",
            remedy="Give the --output-dir of two runs.",
        )
    return path


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text[:12] if len(text) == 64 else text
