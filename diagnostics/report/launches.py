"""The table of launches that were tried on this machine: a row for each, two cells for a death."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from diagnostics.launch.deaths import DEATHS
from diagnostics.launch.shapes import SHAPES
from diagnostics.launch.table import EACH_WORDS, exit_words
from diagnostics.launch.trial import Result

WORDS = {word: meaning for word, meaning in EACH_WORDS.items() if word != "PID!"} | {
    "right, wrong!": "whether the process id that was printed is the trainer's",
    "orphans": "processes of the trainer that still ran, at most",
}


@dataclass(frozen=True)
class Word:
    """What stands in a cell; `lost` is said with a `!` too, for those who see no colour."""

    text: str
    lost: bool = False

    def __str__(self) -> str:
        return f"{self.text}!" if self.lost else self.text


@dataclass(frozen=True)
class LaunchRow:
    """A launch. `cells`: for each death the log and the end. `left`: session, pid, orphans."""

    name: str
    typed: str
    cells: list[Word]
    left: list[Word]


@dataclass(frozen=True)
class LaunchTable:
    """The deaths with their meaning, the rows under their headings, and why some were not tried."""

    deaths: list[tuple[str, str]]
    groups: list[tuple[str, list[LaunchRow]]]
    not_tried: list[str]


def launch_table(more: Mapping[str, Any]) -> LaunchTable | None:
    """From the JSON of `launch-check` without a command; None where nothing was tried."""
    launches = more.get("launches", ())
    endings = [ending for launch in launches for ending in launch["endings"]]
    deaths = list(dict.fromkeys(ending["death"] for ending in endings if ending["result"]))
    if not deaths:
        return None
    groups = [
        (group, [_row(launch, deaths) for launch in rows])
        for group, rows in groupby(launches, key=lambda launch: str(launch["group"]))
    ]
    not_tried = sorted({ending["why"] for ending in endings if ending["why"]})
    return LaunchTable([(name, DEATHS[name].meaning) for name in deaths], groups, not_tried)


def _row(launch: Mapping[str, Any], deaths: Sequence[str]) -> LaunchRow:
    results = {e["death"]: Result(**e["result"]) for e in launch["endings"] if e["result"]}
    shape = launch["shape"]
    cells = [word for name in deaths for word in _pair(shape, name, results.get(name))]
    return LaunchRow(launch["name"], launch["typed"], cells, [*_left(list(results.values()))])


def _pair(shape: str, death: str, result: Result | None) -> list[Word]:
    if result is None:
        return [Word("not tried"), Word("")]
    if result.unclear:
        return [Word("unclear", lost=True), Word(result.unclear)]
    end = exit_words(SHAPES[shape], DEATHS[death], result)
    return [_log(result), Word(end.removesuffix("!"), end.endswith("!"))]


def _log(result: Result) -> Word:
    if not result.log:
        return Word("no log", lost=True)
    if not result.started:
        return Word("log is there")
    short = result.kept < result.written and not result.survived
    lines = f"{result.kept}/{result.written}" if short else str(result.kept)
    if result.last_words is None:
        return Word(lines, short)
    spoke = " tb" if result.last_words else " no tb"
    return Word(lines + spoke, short or not result.last_words)


def _left(results: Sequence[Result]) -> Iterator[Word]:
    sessions = [r.session for r in results if r.session is not None and not r.survived]
    yield Word("" if not sessions else "stays" if all(sessions) else "gone")
    pids = [r.pid_is_trainers for r in results if r.pid_is_trainers is not None]
    yield Word("" if not pids else "right" if all(pids) else "wrong", not all(pids))
    orphans = max((r.orphans for r in results), default=0)
    yield Word(str(orphans) if orphans else "")
