"""`dflash-diag launch-check` alone: launches, really tried on this machine, and what they lose."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import click

from diagnostics.launch import pool, table, trial
from diagnostics.launch.deaths import BUFFERINGS, DEATHS
from diagnostics.launch.losses import judged, losses
from diagnostics.launch.measured import ShapesVerdict, launches, parts, typed
from diagnostics.launch.scene import LINES
from diagnostics.launch.shapes import EXEC, PIPE, SHAPES
from diagnostics.launch.store import Store
from diagnostics.launch.table import Row
from diagnostics.launch.trial import Cell, Result
from diagnostics.render import junit
from diagnostics.verdict import Status

Show = Callable[[str], None]
AT_ONCE = 2
TRIAL_S = 0.35  # before anything was measured
PROGRESS_LINES = 20
NAMED = 6  # in the summary; the evidence names all
# What teaches: exec against pipe, buffered and not; then what else goes wrong, and what does not.
GROUPS = {
    "exec against pipe": (
        Row(EXEC, "default"),
        Row(EXEC, "-u"),
        Row(PIPE, "default"),
        Row(PIPE, "-u"),
        Row("pipefail | tee log", "-u"),
    ),
    "a directory that is missing": (
        Row("> missing/log", "-u"),
        Row("| tee missing/log", "-u"),
    ),
    "in the background": (
        Row("nohup script &", "-u"),
        Row("nohup exec &", "-u"),
        Row("ssh -t: nohup &", "-u"),
    ),
    "detached, in tmux": (
        Row("tmux: exec > log", "default"),
        Row("tmux: exec | tee log", "default"),
        Row("tmux: status in file", "-u"),
        Row("tmux: remain-on-exit", "-u"),
    ),
}
COLUMNS = ("raises", "SIGKILL", "worker lives", "hang-up")
REMEDY = (
    "Run `python -u` (or PYTHONUNBUFFERED=1), redirect into a directory that exists, end scripts\n"
    "  in exec, and let tmux keep the pane: set-option -g remain-on-exit on. With tee: pipefail."
)


def probe(*, full: bool, show: Show, resume: bool) -> tuple[ShapesVerdict, list[junit.Case]]:
    """Start a small program in many ways, let it die in many ways, and see what is left of it.

    Shows each row as its trials end. `full` tries every shape, death and buffering, and keeps the
    results as they come; with `resume` it goes on from those that an earlier run kept.
    """
    groups = {"": every_row()} if full else GROUPS
    rows = [row for group in groups.values() for row in group]
    deaths = tuple(DEATHS) if full else COLUMNS
    asked = [cell for row in rows for cell in row.cells(deaths)]
    left_out = {cell: why for cell in asked if (why := trial.why_not(cell)) is not None}
    cells = [cell for cell in asked if cell not in left_out]
    if not cells:
        return _unknown(next(iter(left_out.values()))), []
    headings = {group[0]: heading for heading, group in groups.items()}
    made = (table.Counts if full else table.Deaths)(rows, deaths)
    measured = _Measured(made, headings, [(row, row.cells(deaths)) for row in rows], show)
    try:
        measured.take(cells, Store() if full else None, resume)
    except pool.Broken as error:
        return _unknown(f"a trial failed: {error}"), []
    except OSError as error:
        return _unknown(f"results cannot be kept: {error}; set XDG_CACHE_HOME"), []
    measured.close(left_out)
    verdict = judge(rows, deaths, measured.results)
    table_of = launches(groups, deaths, measured.results, left_out)
    cases = [*_cases(asked, measured.results, left_out)]
    return replace(verdict, launches=table_of), cases


def every_row() -> tuple[Row, ...]:
    """Every shape with every buffering."""
    return tuple(Row(shape, buffering) for shape in SHAPES for buffering in BUFFERINGS)


class _Measured:
    """The results as they come, and the rows that they complete, in order."""

    def __init__(
        self,
        made: table.Table,
        headings: Mapping[Row, str],
        rows: Sequence[tuple[Row, Sequence[Cell]]],
        show: Show,
    ) -> None:
        self.results: dict[Cell, Result] = {}
        self._table = made
        self._headings = headings
        self._pending = list(rows)
        self._show = show
        self._lines: list[str] = []

    def take(self, cells: Sequence[Cell], store: Store | None, resume: bool) -> None:
        """Try the cells that are not known yet. Raises pool.Broken, OSError."""
        self._possible = set(cells)
        if store is not None:
            self._remember(store, resume)
        todo = [cell for cell in cells if cell not in self.results]
        self._open(len(todo))
        started_s = time.monotonic()
        for done, (cell, result) in enumerate(pool.results(todo, trial.run, AT_ONCE), start=1):
            self.results[cell] = result
            if store is not None:
                store.add(cell, result)
                self._progress(done, len(todo), time.monotonic() - started_s)
            self._fill()

    def _remember(self, store: Store, resume: bool) -> None:
        if not resume:
            store.clear()
        self.results = {c: r for c, r in store.load().items() if c in self._possible}
        self._show(f"results are kept in {store.path}")
        if self.results:
            self._show(f"{len(self.results)} of them are from an earlier run")

    def _open(self, count: int) -> None:
        estimate = timedelta(seconds=round(count * TRIAL_S / AT_ONCE))
        self._show(
            f"{count} launches of a program that writes {LINES} lines and dies, {AT_ONCE} at a "
            f"time: about {estimate}\n"
        )
        self._show(self._table.head)
        self._fill()

    def _progress(self, done: int, total: int, so_far_s: float) -> None:
        if done * PROGRESS_LINES // total > (done - 1) * PROGRESS_LINES // total:
            left = timedelta(seconds=round(so_far_s / done * (total - done)))
            self._show(f"-- {done} of {total} launches, {left} left")

    def _fill(self) -> None:
        while self._pending and self._is_complete(self._pending[0][1]):
            row, _ = self._pending.pop(0)
            if heading := self._headings.get(row):
                self._show(click.style(f"\n{heading}", bold=True))
            line = self._table.line(row, self.results)
            self._lines.append(line)
            self._show(line)

    def _is_complete(self, cells: Sequence[Cell]) -> bool:
        return all(cell in self.results for cell in cells if cell in self._possible)

    def close(self, left_out: Mapping[Cell, str]) -> None:
        """The words that were used, exec against pipe in numbers, and what was not run."""
        self._show("")
        for line in self._table.legend(self._lines):
            self._show(line)
        self._show("")
        for line in table.headlines(self.results):
            self._show(line)
        for why in sorted(set(left_out.values()) - {""}):
            count = sum(reason == why for reason in left_out.values())
            self._show(f"not run: {count} launches, {why}")


def judge(
    rows: Sequence[Row], deaths: Sequence[str], results: Mapping[Cell, Result]
) -> ShapesVerdict:
    """One sentence: how many launches lose something, and which lose nothing."""
    tried = {row.title: _lost(row, deaths, results) for row in rows}
    lost = {title: found for title, found in tried.items() if found is not None}
    unclear = sum(bool(result.unclear) for result in results.values())
    clean = [title for title, found in lost.items() if not found]
    evidence = {
        title: f"{'; '.join(found) or 'nothing lost'} | {typed(row)}"
        for row in rows
        if (found := lost.get(title := row.title)) is not None
    }
    if len(clean) < len(lost):
        summary = f"{len(lost) - len(clean)} of {len(lost)} ways to launch lose something here"
        if clean:
            more = f" and {len(clean) - NAMED} more" if len(clean) > NAMED else ""
            summary += f"; nothing is lost by: {', '.join(clean[:NAMED])}{more}"
        return ShapesVerdict(Status.PROBLEM, "shapes-lose", summary, evidence, REMEDY)
    if unclear:
        return _unknown(f"{unclear} launches told nothing")
    return ShapesVerdict(Status.OK, "shapes-keep", f"all {len(lost)} launches keep all", evidence)


def _lost(row: Row, deaths: Sequence[str], results: Mapping[Cell, Result]) -> list[str] | None:
    """`SIGKILL: 72 of 200 lines, ...` for each death that loses; None if none could be tried."""
    ran = [(cell, results[cell]) for cell in row.cells(deaths) if cell in results]
    if not ran:
        return None
    found = [(cell.death, losses(*parts(cell), result)) for cell, result in ran]
    return [f"{death}: {', '.join(what)}" for death, what in found if what]


def _unknown(why: str) -> ShapesVerdict:
    return ShapesVerdict(Status.UNKNOWN, "shapes-unknown", why)


def _cases(
    asked: Iterable[Cell], results: Mapping[Cell, Result], left_out: Mapping[Cell, str]
) -> Iterator[junit.Case]:
    """One for each trial; a combination that makes no sense is none."""
    for cell in asked:
        classname = f"{cell.shape} / {cell.buffering}"
        if cell in results:
            yield junit.Case(classname, cell.death, *judged(*parts(cell), results[cell]))
        elif left_out[cell]:
            yield junit.Case(classname, cell.death, None, left_out[cell])
