"""What the table of launches measured on this machine, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diagnostics.launch.deaths import BUFFERINGS, DEATHS, Death
from diagnostics.launch.losses import losses
from diagnostics.launch.shapes import PYTHON, SHAPES, Shape
from diagnostics.launch.table import Row
from diagnostics.launch.trial import Cell, Result
from diagnostics.verdict import Verdict


@dataclass(frozen=True)
class Ending:
    """What one launch left when it died so; without a `result` it was not tried, and `why`."""

    death: str
    result: Result | None = None
    lost: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Launch:
    """One way to launch: its name in the table, that of its shape, and how it ended each time."""

    name: str
    shape: str
    typed: str
    group: str
    endings: tuple[Ending, ...]


@dataclass(frozen=True)
class ShapesVerdict(Verdict):
    """A verdict with the whole table."""

    launches: tuple[Launch, ...] = ()


def launches(
    groups: Mapping[str, Sequence[Row]],
    deaths: Sequence[str],
    results: Mapping[Cell, Result],
    left_out: Mapping[Cell, str],
) -> tuple[Launch, ...]:
    """The table; a death that makes no sense for a launch is no ending of it."""
    return tuple(
        Launch(
            row.title, row.shape, typed(row), group, tuple(_endings(row, deaths, results, left_out))
        )
        for group, rows in groups.items()
        for row in rows
    )


def _endings(
    row: Row, deaths: Sequence[str], results: Mapping[Cell, Result], left_out: Mapping[Cell, str]
) -> list[Ending]:
    cells = row.cells(deaths)
    tried = [
        Ending(cell.death, results[cell], tuple(losses(*parts(cell), results[cell])))
        for cell in cells
        if cell in results
    ]
    return tried + [Ending(c.death, why=left_out[c]) for c in cells if left_out.get(c)]


def typed(row: Row) -> str:
    """The launch as a user types it, and the script that it runs."""
    shape, buffering = SHAPES[row.shape], BUFFERINGS[row.buffering]
    variables = [f"{name}={value}" for name, value in buffering.variables]
    script = [f"(start.sh: {shape.script})"] if shape.script else []
    return " ".join([*variables, shape.line, *script]).replace(PYTHON, buffering.python)


def parts(cell: Cell) -> tuple[Shape, Death]:
    """What the names of a cell stand for."""
    return SHAPES[cell.shape], DEATHS[cell.death]
