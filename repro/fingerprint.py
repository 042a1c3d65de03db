"""What decides how threads that run by turns go on: their frames, and all that these can reach.

Two moments with equal fingerprints go on alike. A thread's future is a function of where each of
its frames stands, of its variables, and of what they lead to; what else lies on a frame's value
stack (a `with` that is open, a loop over a range) follows from these in the code this is used on.
Objects are numbered as they are met, so that sharing counts and addresses do not. What cannot be
read exactly raises `Unclear` instead of being left out.
"""

from __future__ import annotations

import contextvars
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    TracebackType,
)
from typing import Any

import turns
from turns import Player, Unclear

# They say nothing about the future, or nothing that is not met elsewhere.
OPAQUE = (BuiltinFunctionType, contextvars.Context, TracebackType, CodeType, Player)


class _Reader:
    """Turns everything into a list of words."""

    def __init__(self, unobserved: Mapping[type, set[str]]) -> None:
        self.words: list[Any] = []
        self._unobserved = unobserved
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def frames(self, player: Player, frame: FrameType | None) -> None:
        """Every frame of the thread below the player's own."""
        while frame is not None and frame.f_code is not Player._run.__code__:
            self.frame(frame)
            frame = frame.f_back

    def frame(self, frame: FrameType) -> None:
        self.words += (frame.f_code.co_qualname, frame.f_lasti)
        self.mapping(frame.f_locals)

    def mapping(self, items: Mapping[Any, Any], but: Iterable[str] = ()) -> None:
        for key, value in items.items():
            if key not in but:
                self.read(key)
                self.read(value)
        self.words.append("}")

    def sequence(self, items: Iterable[Any]) -> None:
        for item in items:
            self.read(item)
        self.words.append("]")

    def read(self, thing: Any) -> None:
        kind = type(thing)
        if kind in ATOMS:
            self.words.append(thing)
            return
        number = self._numbers.get(id(thing))
        if number is not None:
            self.words.append((number,))
            return
        self._numbers[id(thing)] = len(self._numbers)
        self._kept.append(thing)
        self.words.append(kind)
        reader = READERS.get(kind)
        if reader is None:
            reader = READERS[kind] = next(READERS[base] for base in kind.__mro__ if base in READERS)
        reader(self, thing)

    def set(self, items: set[Any]) -> None:
        """Raises `Unclear` if it has several members that nothing else tells apart."""
        atoms = sorted(item for item in items if isinstance(item, str))
        known = sorted(n for item in items if (n := self._numbers.get(id(item))) is not None)
        named = sorted(
            (i for i in items if not isinstance(i, str) and id(i) not in self._numbers),
            key=lambda item: getattr(item, "name", ""),
        )
        if len({getattr(item, "name", "") for item in named}) < len(named):
            raise Unclear(f"cannot order the members of {items}")
        self.sequence([*atoms, *known, *named])

    def error(self, error: BaseException) -> None:
        self.sequence(error.args)
        self.read(error.__cause__)
        self.sequence(getattr(error, "__notes__", ()))

    def function(self, function: FunctionType) -> None:
        self.words.append(function.__qualname__)
        self.sequence(function.__closure__ or ())

    def cell(self, cell: CellType) -> None:
        try:
            self.read(cell.cell_contents)
        except ValueError:
            self.words.append("empty")

    def generator(self, generator: GeneratorType[Any, Any, Any]) -> None:
        if generator.gi_frame is not None:
            self.frame(generator.gi_frame)

    def iterator(self, iterator: Any) -> None:
        """What it iterates over, and how far it is."""
        self.sequence(iterator.__reduce__()[1:])

    def attributes(self, thing: Any) -> None:
        kind = type(thing)
        try:
            attributes = object.__getattribute__(thing, "__dict__")
        except AttributeError:
            raise Unclear(f"cannot tell the state of a {kind.__qualname__}") from None
        self.mapping(attributes, self._unobserved.get(kind, ()))

    def nothing(self, _thing: Any) -> None:
        """Its type is all that counts."""


ATOMS = frozenset((int, float, str, bytes, bool, type(None)))
READERS: dict[type, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(OPAQUE, _Reader.nothing),
    **dict.fromkeys((tuple, list, deque), _Reader.sequence),
    **dict.fromkeys((set, frozenset), _Reader.set),
    dict: _Reader.mapping,
    BaseException: _Reader.error,
    FunctionType: _Reader.function,
    MethodType: lambda reader, method: reader.sequence((method.__func__, method.__self__)),
    CellType: _Reader.cell,
    GeneratorType: _Reader.generator,
    **dict.fromkeys(map(type, (iter(()), iter([]), iter(range(0)))), _Reader.iterator),
    range: lambda reader, numbers: reader.words.append(repr(numbers)),
    type: lambda reader, kind: reader.words.append(kind.__qualname__),
    object: _Reader.attributes,
}


def fingerprint(company: Sequence[Player], unobserved: Mapping[type, set[str]]) -> bytes:
    """A digest of where everybody stands.

    `unobserved`: attributes, by class, that no code looks at which decides anything.
    Raises `Unclear` where something cannot be read.
    """
    reader, frames = _Reader(unobserved), sys._current_frames()
    for player in company:
        reader.words += (player.name, player.ended is not None)
        if not player.ended:
            frame = frames.get(player.thread.ident or 0)
            while frame is not None and frame.f_globals is vars(turns):
                frame = frame.f_back
            reader.frames(player, frame)
    return hashlib.blake2b(repr(reader.words).encode(), digest_size=16).digest()
