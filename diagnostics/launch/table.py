"""The table of launches, for people: a row for each, filled as its trials end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import click

from diagnostics.launch.deaths import DEATHS, Blow, Death
from diagnostics.launch.losses import in_words, seen_right, true_status
from diagnostics.launch.shapes import EXEC, PIPE, PYTHON, SHAPES, Shape
from diagnostics.launch.trial import Cell, Result

Results = Mapping[Cell, Result]
WORDS = {
    "!": "lost or wrong",
    "no start!": "the trainer never started",
    "?": "it started: that was chance, and another time it does not",
    "tb": "the traceback is in the log",
    "no!": "no log",
    "hangs!": "the launch waits on, though the trainer is dead",
    "-!": "nobody keeps the exit status",
    "dies!": "the trainer dies when the connection is lost",
    "gone": "the tmux session is gone with the trainer",
    "stays": "the tmux session stays, with its last screen",
    "PID!": "the process id that was printed is not the trainer's",
}


@dataclass(frozen=True)
class Row:
    """A launch: the names of its shape and buffering."""

    shape: str
    buffering: str

    @property
    def title(self) -> str:
        """As the table shows it."""
        return self.shape if self.buffering == "default" else f"{self.shape} {self.buffering}"

    def cells(self, deaths: Sequence[str]) -> list[Cell]:
        """One for each death."""
        return [Cell(self.shape, death, self.buffering) for death in deaths]


class Table(Protocol):
    """What a table of launches has: a head, a line for each row, and the words it used."""

    head: str

    def __init__(self, rows: Sequence[Row], deaths: Sequence[str]) -> None: ...

    def line(self, row: Row, results: Results) -> str:
        """A row, filled."""

    def legend(self, lines: Sequence[str]) -> Iterator[str]:
        """What is not plain in these lines."""


class Deaths:
    """A few deaths side by side: at most 80 columns for four."""

    def __init__(self, rows: Sequence[Row], deaths: Sequence[str]) -> None:
        self._width = max(len(row.title) for row in rows) + 1
        self._columns = [_Column(death) for death in deaths]
        names = "".join(column.name.ljust(column.width) for column in self._columns)
        parts = "".join(column.parts for column in self._columns)
        self.head = f"{'':{self._width}}{names.rstrip()}\n{'':{self._width}}{parts}left"

    def line(self, row: Row, results: Results) -> str:
        """The lines in the log and what is known of the end, for each death; what is left."""
        found = [results.get(cell) for cell in row.cells([c.name for c in self._columns])]
        races = SHAPES[row.shape].races
        words = [c.words(result, races) for c, result in zip(self._columns, found, strict=True)]
        left = _left([result for result in found if result is not None])
        return f"{row.title:<{self._width}}{''.join(words)}{left}".rstrip()

    def legend(self, lines: Sequence[str]) -> Iterator[str]:
        """The deaths, and the words that were used."""
        for column in self._columns:
            yield f"{column.name:<13}{DEATHS[column.name].meaning}"
        text = click.unstyle(" ".join(lines))
        for word, meaning in WORDS.items():
            if word in text.split() or (word in text and word in ("!", "?", "no start!")):
                yield f"{word:<13}{meaning}"


class _Column:
    """One death: the lines kept, its last words if it has any, and its end."""

    def __init__(self, death: str) -> None:
        self.name = death
        self._speaks = 3 * bool(DEATHS[death].last_words)
        self._hangs_up = DEATHS[death].blow is Blow.HANG_UP
        self.width = max(len(death) + 1, 6 + 6 + self._speaks - bool(self._speaks))
        end = "run" if self._hangs_up else "exit"
        self.parts = f"{'lines':<6}{'':{self._speaks}}{end}".ljust(self.width)

    def words(self, result: Result | None, races: bool) -> str:
        """The cell, painted, as wide as the column. `races`: its start is chance."""
        if result is None:
            return "not run".ljust(self.width)
        if result.unclear:
            return _painted("unclear!", self.width)
        if not result.started:
            return _painted("no start!", self.width)
        lines = f"{result.kept}{'!' * (not result.survived and result.kept < result.written)}"
        lines += "?" * races
        words = _painted(lines if result.log else "no!", 6)
        if self._speaks:
            words += _painted("tb" if result.last_words else "!", self._speaks)
        return words + _painted(self._end(result), self.width - 6 - self._speaks)

    def _end(self, result: Result) -> str:
        if self._hangs_up:
            return "runs" if result.survived else "dies!"
        if result.hangs:
            return "hangs!"
        true = true_status(DEATHS[self.name], result)
        seen = "-" if result.status is None else in_words(result.status).removeprefix("SIG")
        return seen if true is None or seen_right(true, result.status) else f"{seen}!"


def _painted(word: str, width: int) -> str:
    """Padded; red where something is lost. `click.echo` drops the colour outside a terminal."""
    padded = word.ljust(width)
    return click.style(padded, fg="red") if word.endswith("!") else padded


def _left(results: Sequence[Result], width: int = 0) -> str:
    """What there is to look at when the trainer has died: a session, a process id."""
    sessions = [r.session for r in results if r.session is not None and not r.survived]
    if sessions:
        return ("stays" if all(sessions) else "gone").ljust(width)
    pids = [r.pid_is_trainers for r in results if r.pid_is_trainers is not None]
    return _painted("" if not pids else "PID" if all(pids) else "PID!", width)


class Counts:
    """Every death: of how many each thing was kept."""

    NAMES = ("deaths", "log", "all", "last", "exit", "hang-up", "left")
    PARTS = ("", "there", "lines", "words", "status", "", "")
    WIDTH = 8

    def __init__(self, rows: Sequence[Row], deaths: Sequence[str]) -> None:
        self._deaths = deaths
        self._width = max(len(row.title) for row in rows) + 1
        heads = ("".join(f"{word:<{self.WIDTH}}" for word in n) for n in (self.NAMES, self.PARTS))
        self.head = "\n".join(f"{'':{self._width}}{head}".rstrip() for head in heads)

    def line(self, row: Row, results: Results) -> str:
        """Counts: 3/7! is three of seven."""
        pairs = [(cell, results[cell]) for cell in row.cells(self._deaths) if cell in results]
        ran = [(cell, result) for cell, result in pairs if not result.unclear]
        dead = [(cell, result) for cell, result in ran if not result.survived]
        found = [result for _, result in ran]
        hung_up = [r.survived for c, r in ran if r.started and _hangs_up(c)]
        words = (
            f"{len(ran)}{'?' * SHAPES[row.shape].races}",
            _of([result.log for result in found]),
            _of([r.kept == r.written for _, r in dead if r.started]),
            _of([r.last_words for r in found if r.last_words is not None and not r.returned]),
            _of([seen for cell, r in dead if (seen := _is_seen(cell, r)) is not None]),
            "" if not hung_up else "runs" if all(hung_up) else "dies!",
            _left([r for c, r in ran if DEATHS[c.death].blow is not Blow.KILL_SESSION]),
        )
        painted = "".join(_painted(word, self.WIDTH) for word in words)
        return f"{row.title:<{self._width}}{painted}".rstrip()

    def legend(self, lines: Sequence[str]) -> Iterator[str]:
        """The heads, which are short."""
        yield "3/7!         kept in three deaths of seven"
        yield "7?           whether it starts is chance: another time the counts are others"
        yield "last words   tracebacks and messages, in the log"
        yield "exit status  of the deaths that have one other than 0"
        yield "hang-up      whether the trainer runs on when the connection is lost"
        for word in ("-", "gone", "stays", "PID!"):
            yield f"{word:<13}{WORDS.get(word, 'there is none')}"


def _hangs_up(cell: Cell) -> bool:
    return DEATHS[cell.death].blow is Blow.HANG_UP


def _of(values: Sequence[bool | None]) -> str:
    good = sum(map(bool, values))
    return f"{good}/{len(values)}{'!' * (good < len(values))}" if values else "-"


def _is_seen(cell: Cell, result: Result) -> bool | None:
    """Whether the exit status can be seen; None if it says nothing (0 is what one sees anyway)."""
    true = true_status(DEATHS[cell.death], result)
    if not result.started or _hangs_up(cell) or not true:
        return None
    return not result.hangs and seen_right(true, result.status)


EACH = (24, 5, 9, 12, 14)
EACH_HEAD = (
    "".join(
        word.ljust(width)
        for word, width in zip(("death", "log", "lines", "last words", "exit"), EACH, strict=True)
    )
    + "left"
)


EACH_WORDS = {
    "0 not 1!": "the launch says 0, and the trainer ended with 1; -: nobody keeps the exit status",
    **{word: WORDS[word] for word in ("hangs!", "dies!", "gone", "stays", "PID!")},
    "runs on!": "the trainer outlives what was to end it",
}


def each_legend(lines: Sequence[str]) -> Iterator[str]:
    """The words that these lines used."""
    text = click.unstyle(" ".join(lines))
    for word, meaning in EACH_WORDS.items():
        if word in text or (" not " in word and " not " in text):
            yield f"{word:<13}{meaning}"


def each(shape: Shape, death: Death, result: Result) -> str:
    """One death of one launch, a line of its own."""
    if result.unclear:
        return f"{death.name:<{EACH[0]}}{_painted('unclear!', 0)} {result.unclear}"
    short = not result.survived and result.kept < result.written
    lines = f"{result.kept}/{result.written}{'!' * short}"
    missing = "" if result.returned or result.last_words is None else "no!"
    said = "yes" if result.last_words else missing
    words = (
        death.name,
        "yes" if result.log else "no!",
        lines,
        said,
        exit_words(shape, death, result),
    )
    painted = (_painted(word, width) for word, width in zip(words, EACH, strict=True))
    orphans = f"{result.orphans} left running" if result.orphans else ""
    return f"{''.join(painted)}{_left([result], 7)}{orphans}".rstrip()


def exit_words(shape: Shape, death: Death, result: Result) -> str:
    """How the launch says that it ended: `137`, or `0 not KILL!` where it was another."""
    if not result.started:
        return "not started!"
    if result.survived:
        return "runs on" if death.blow is Blow.HANG_UP else "runs on!"
    if death.blow is Blow.HANG_UP:
        return "dies!"
    if result.hangs:
        return "hangs!"
    true = true_status(death, result)
    seen = "-" if result.status is None else in_words(result.status).removeprefix("SIG")
    if true is None or seen_right(true, result.status):
        return seen
    return f"{seen} not {in_words(true).removeprefix('SIG')}!"


def headlines(results: Results) -> Iterator[str]:
    """Exec against pipe: as typed, and in numbers."""
    for shape in (EXEC, PIPE):
        yield f"{shape:<16}{SHAPES[shape].line}"
    yield f"{'':16}where start.sh says: {SHAPES[EXEC].script.replace(PYTHON, 'python3')}"
    yield ""
    yield f"{'':16}{'log kept':<10}{'exit status':<13}{'lines lost':<12}{'with -u':<9}never ended"
    for shape in (EXEC, PIPE):
        pairs = [(cell, r) for cell, r in results.items() if cell.shape == shape and r.started]
        if pairs:
            yield f"{shape:<16}{_headline(pairs)}"


def _headline(pairs: Sequence[tuple[Cell, Result]]) -> str:
    logs = [result.log for _, result in pairs]
    seen = [known for cell, result in pairs if (known := _is_seen(cell, result)) is not None]
    hangs = sum(result.hangs for _, result in pairs)
    lost, unbuffered = (_most_lost(pairs, name) for name in ("default", "-u"))
    words = (_painted(_of(logs), 10) + _painted(_of(seen), 13)) + _painted(lost, 12)
    return words + _painted(unbuffered, 9) + _painted(f"{hangs}{'!' * bool(hangs)}", 0)


def _most_lost(pairs: Sequence[tuple[Cell, Result]], buffering: str) -> str:
    """By buffering alone: a full disk and a killed tee take lines of any."""
    deaths = {name for name, d in DEATHS.items() if not d.needs and d.blow is not Blow.KILL_TEE}
    lost = [
        r.written - r.kept
        for cell, r in pairs
        if cell.buffering == buffering and cell.death in deaths
    ]
    return f"{max(lost)}{'!' * bool(max(lost))}" if lost else "-"
