"""Read the stacks out of a log: tracebacks, and dumps of all threads by faulthandler or py-spy.

A log is what several threads wrote at once. Lines are told apart by what stands before them (a
rank, a logger's name), once colours, progress bars and timestamps are taken away. Where two
tracebacks share that too, their frames cannot be told apart, and both are marked `mixed`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
TIMESTAMP = re.compile(
    r"\[?(?:\d{4}-\d\d-\d\d[T ])?(?:[A-Z][a-z]{2} [ \d]\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?"
    r"(?:Z|[+-]\d\d:?\d\d)?\]?"
)
HEADER = "Traceback (most recent call last)"
FRAME = re.compile(r'File "(?P<path>[^"]+)", line \d+(?P<comma>,?) in (?P<function>\S+)')
# Python shows the module of every exception that is neither built in nor defined in __main__.
RAISED = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)+[A-Z]\w*"
    r"|[A-Z]\w*(?:Error|Exception|Exit|Failed|Group|Interrupt|Iteration|Warning))"
    r"(?:: ?(?P<message>.*)|$)"
)
FLAT_FRAME = re.compile(r' +(?=File ")')
FLAT_RAISED = re.compile(r" +(?=[\w.]*(?:Error|Exception)(?:: |\s*$))")
THREAD = re.compile(
    r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
    r"|Thread \w+ \((?:active|idle)[^)]*\)"
)
NEW_DUMP = re.compile(r"\bProcess \d+: |\bTimeout \(\d+:\d\d:\d\d")
PY_SPY_FRAME = re.compile(r"\s{2}(?P<function>\S+) \((?P<path>[^()]+):\d+\)\s*$")
MARKS = (HEADER, 'File "', 'File \\"', "File \x1b", "hread ")  # the last but one: of Python 3.13
# No timestamp is looked for further to the right.
PREFIX = 80
# A stack that nothing was added to for so many lines is over, whether its end was seen or not.
LONGEST_GAP = 200


@dataclass(frozen=True)
class Frame:
    """One call; `path` as it stands in the log, with forward slashes."""

    path: str
    function: str

    def __str__(self) -> str:
        return f"{self.function} in {self.path.rpartition('site-packages/')[2]}"

    def within(self, file: str, *functions: str) -> bool:
        """Whether this is one of the functions in a file, given by the end of its path."""
        return self.function in functions and self.path.endswith(file)


@dataclass(frozen=True)
class Traceback:
    """What was raised, on which line of the log that stands, and the frames, outermost first."""

    frames: tuple[Frame, ...]
    error: str
    message: str
    line: int
    mixed: bool = False


@dataclass(frozen=True)
class Dump:
    """All threads of a process at one moment: of each its frames, innermost first."""

    threads: tuple[tuple[Frame, ...], ...]
    line: int


class Line(NamedTuple):
    """A line that belongs to no stack, as it stands in the log."""

    text: str
    line: int


@dataclass
class _Open:
    """A traceback whose end has not been seen; `ends` is how many exceptions are still to come."""

    touched: int
    ends: int = 1
    mixed: bool = False
    frames: list[Frame] = field(default_factory=list)


def read(numbered: Iterable[tuple[int, str]]) -> Iterator[Traceback | Dump | Line]:
    """Everything in the log, in the order in which it ends. `numbered`: line numbers and lines."""
    tracebacks, dumps = _Tracebacks(), _Dumps()
    for number, raw in numbered:
        # Nearly every line of a log: seven times faster than the way below.
        if tracebacks.idle and dumps.idle and not any(mark in raw for mark in MARKS):
            yield Line(raw, number)
            continue
        for text in _pieces(raw):
            yield from dumps.ended_by(text, number)
            if dumps.take(text, number) or tracebacks.take_frame(text, number):
                continue
            yield tracebacks.end(text, number) or Line(text, number)
    yield from dumps.flush()


def _pieces(raw: str) -> Iterator[str]:
    """The lines within a line: of a progress bar, of JSON, of a paste that lost its line ends."""
    if "\\n  File \\" in raw:
        raw = raw.replace("\\n", "\n").replace('\\"', '"')
    if HEADER in raw and 'File "' in raw:
        raw = FLAT_RAISED.sub("\n", FLAT_FRAME.sub("\n  ", raw))
    for piece in re.split(r"[\r\n]+", raw.rstrip("\r\n")):
        text = COLOUR.sub("", piece) if "\x1b" in piece else piece
        yield TIMESTAMP.sub("", text[:PREFIX], count=1) + text[PREFIX:]


class _Tracebacks:
    """The tracebacks under way, by what stands before their lines."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._headers: Counter[str] = Counter()

    @property
    def idle(self) -> bool:
        return not self._open

    def take_frame(self, text: str, number: int) -> bool:
        """Whether the line opens a traceback or adds frames to one."""
        if HEADER in text:
            self._headers[text[: text.index(HEADER)]] += 1
            return True
        first = FRAME.search(text) if 'File "' in text else None
        if first is None or not first["comma"]:
            return False
        stack = self._stack(text[: first.start()].removesuffix("  "), number)
        stack.frames.append(Frame(_slashes(first["path"]), first["function"]))
        return True

    def _stack(self, prefix: str, number: int) -> _Open:
        stack, headers = self._open.get(prefix), self._headers.pop(prefix, 0)
        if stack is None:
            stack = self._open[prefix] = _Open(number, max(1, headers), headers > 1)
        elif headers:
            stack.ends, stack.mixed = stack.ends + headers, True
        stack.touched = number
        return stack

    def end(self, text: str, number: int) -> Traceback | None:
        """The traceback that the line ends, if it names the exception of one."""
        for prefix in [p for p, s in self._open.items() if number - s.touched > LONGEST_GAP]:
            del self._open[prefix]
        for prefix in sorted(self._open, key=len, reverse=True):
            raised = text.startswith(prefix) and RAISED.match(text, len(prefix))
            if raised:
                return self._ended(prefix, raised, number)
        return None

    def _ended(self, prefix: str, raised: re.Match[str], number: int) -> Traceback:
        stack = self._open[prefix]
        stack.ends -= 1
        if not stack.ends:
            del self._open[prefix]
        message = (raised["message"] or "").strip()
        return Traceback(tuple(stack.frames), raised["type"], message, number, stack.mixed)


class _Dumps:
    """The dump under way."""

    def __init__(self) -> None:
        self._threads: list[list[Frame]] = []
        self._line = self._touched = 0

    @property
    def idle(self) -> bool:
        return not self._threads

    def ended_by(self, text: str, number: int) -> Iterator[Dump]:
        """The dump under way, if the line shows that it is complete."""
        over = HEADER in text or NEW_DUMP.search(text) or number - self._touched > LONGEST_GAP
        if self._threads and over:
            yield from self.flush()

    def take(self, text: str, number: int) -> bool:
        """Whether the line belongs to a dump."""
        if "hread " in text and THREAD.search(text):
            if not self._threads:
                self._line = number
            self._threads.append([])
        elif frame := self._frame(text):
            self._threads[-1].append(frame)
        else:
            return False
        self._touched = number
        return True

    def _frame(self, text: str) -> Frame | None:
        if not self._threads:
            return None
        found = FRAME.search(text)
        if found and found["comma"]:
            return None  # of a traceback
        found = found or PY_SPY_FRAME.search(text)
        if found is None:
            return None
        function = found["function"].rpartition(".")[2]  # py-spy shows the class as well
        return Frame(_slashes(found["path"]), function)

    def flush(self) -> Iterator[Dump]:
        """The dump under way, if there is one."""
        if self._threads:
            yield Dump(tuple(map(tuple, self._threads)), self._line)
            self._threads = []


def _slashes(path: str) -> str:
    return path.replace("\\", "/")
