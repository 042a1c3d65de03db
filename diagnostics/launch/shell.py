"""Shell text as a small model: simple commands, pipelines, redirects, words, each with its place.

For every character it keeps where that stands in what the user typed. A text that was taken out of
quotes can so be parsed again, any number of times, and a finding still points at the right
characters. `parse.py` makes these values.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Source:
    """What the user typed: a command line, or a script with its path.

    `directory` is where the script lies as it sees that itself, `$(dirname "$0")`.
    """

    name: str
    text: str
    path: Path | None = None
    directory: str = ""


@dataclass(frozen=True)
class Span:
    """The characters `start` to `end` (exclusive) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        """Counted from 1, as editors do."""
        return self.source.text.count("\n", 0, self.start) + 1

    @property
    def column(self) -> int:
        """Counted from 1, in characters."""
        return self.start - self.source.text.rfind("\n", 0, self.start)

    @property
    def text(self) -> str:
        """The characters themselves, as typed."""
        return self.source.text[self.start : self.end]

    @property
    def typed_line(self) -> str:
        """The whole line that it begins in."""
        return self.source.text.split("\n")[self.line - 1]

    def covers(self, other: "Span") -> bool:
        """Whether the other lies within."""
        return self.source == other.source and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class Text:
    """Characters, each with its offset in the source: `value[i]` was typed at `origins[i]`."""

    value: str
    origins: tuple[int, ...]
    source: Source

    @classmethod
    def of(cls, source: Source) -> Self:
        """The whole of a source."""
        return cls(source.text, tuple(range(len(source.text))), source)

    def cut(self, start: int, end: int) -> "Text":
        """The characters `start` to `end` (exclusive) of this text."""
        return Text(self.value[start:end], self.origins[start:end], self.source)

    def pick(self, offsets: Iterable[int]) -> "Text":
        """The characters at these offsets."""
        kept = [*offsets]
        value = "".join(self.value[i] for i in kept)
        return Text(value, tuple(self.origins[i] for i in kept), self.source)

    def span(self, start: int = 0, end: int | None = None) -> Span:
        """Where these characters were typed; for none of them, where they would have been."""
        origins = self.origins[start:end]
        if not origins:
            at = [*self.origins[start : start + 1], *(i + 1 for i in self.origins[-1:]), 0][0]
            return Span(self.source, at, at)
        return Span(self.source, origins[0], origins[-1] + 1)


def join(texts: Iterable[Text]) -> Text:
    """With a space between them, as ssh and eval join their arguments. Raises on no text."""
    first, *others = texts
    value, origins = first.value, [*first.origins]
    for text in others:
        value += " " + text.value
        origins += [text.span().start - 1, *text.origins]
    return Text(value, tuple(origins), first.source)


@dataclass(frozen=True)
class Expansion:
    """`$!`, `${NAME}`, `$(command)`: as typed, where, and the name if it is a variable's."""

    name: str
    span: Span


@dataclass(frozen=True)
class Word:
    """One word of a command: `text` is it without its quotes; expansions stay as typed."""

    text: Text
    span: Span
    expansions: tuple[Expansion, ...] = ()
    quoted: bool = False

    @property
    def value(self) -> str:
        """The characters without quotes."""
        return self.text.value


@dataclass(frozen=True)
class Redirect:
    """`2>> path`: `fd` is 2, `operator` `>>`. `&>` has fd 1 and concerns 2 as well.

    `into` are the commands of a process substitution, `> >(tee log)`; `body` a here-document's.
    """

    operator: str
    fd: int
    target: Word | None
    span: Span
    into: tuple["Command", ...] = ()
    body: Text | None = None

    @property
    def writes(self) -> bool:
        """Whether it opens a file for writing (and is no `2>&1` and no pipe into a program)."""
        opens = self.operator in {">", ">>", ">|", "&>", "&>>", "<>"} or self.both_by_name
        return opens and self.target is not None and not self.into

    @property
    def both_by_name(self) -> bool:
        """`>& file`, the old spelling of `&> file`."""
        word = self.target.value if self.target else ""
        return self.operator == ">&" and not word.isdigit() and word != "-"

    @property
    def appends(self) -> bool:
        """Whether what is in the file stays."""
        return self.operator in {">>", "&>>"}


@dataclass(frozen=True, eq=False)
class Command:
    """A simple command. The redirects of the blocks around it come first, then its own."""

    words: tuple[Word, ...]
    assignments: tuple[tuple[str, Word], ...]
    redirects: tuple[Redirect, ...]
    span: Span

    @cached_property
    def argv(self) -> list[str]:
        """The words without their quotes."""
        return [word.value for word in self.words]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Commands joined by `|`; one alone is a pipeline too. Piping a block pipes each command of it.

    `block` names the compound statement around it, outermost first: () is the script's own level.
    `ends_with` is what follows: `&`, `&&`, `||`, `;` or nothing (the end of a line); `background`
    also holds for what is inside a block or a list that ends with `&`. `pipes` are `|` and `|&`.
    """

    commands: tuple[Command, ...]
    pipes: tuple[str, ...] = ()
    ends_with: str = ""
    background: bool = False
    block: tuple[int, ...] = ()

    @property
    def span(self) -> Span:
        """From the first command to the last."""
        first, last = self.commands[0].span, self.commands[-1].span
        return Span(first.source, first.start, max(first.end, last.end))


@dataclass(frozen=True, eq=False)
class Script:
    """A shell text in the order in which it is written.

    `functions` are the bodies of those that it defines, which run where they are called: they are
    not among its `pipelines`. `start` is the place in front of its first statement, `code` the text
    without functions and comments.
    """

    text: Text
    pipelines: tuple[Pipeline, ...]
    functions: dict[str, Text]
    start: Span
    code: str
    comments: tuple[Text, ...] = ()
    broken: Span | None = None  # the first characters that do not parse

    def before(self, pipeline: Pipeline) -> tuple[Pipeline, ...]:
        """What is written in front of it."""
        return self.pipelines[: self.pipelines.index(pipeline)]

    def after(self, pipeline: Pipeline) -> tuple[Pipeline, ...]:
        """What is written behind it."""
        return self.pipelines[self.pipelines.index(pipeline) + 1 :]

    def outlasts(self, earlier: Pipeline, later: Pipeline) -> bool:
        """Whether what a pipeline sets is still set in a later one: in no `( … )` that is over."""
        over = (start for start in earlier.block if start not in later.block)
        return not any(self.text.value[start] == "(" for start in over)


def unquoted(raw: str, expansions: list[tuple[int, int]]) -> Iterator[int]:
    """The offsets of the characters that are left when the shell has taken the quotes off."""
    ends = dict(expansions)
    quote = ""
    i = 0
    while i < len(raw):
        if i in ends and quote != "'":
            yield from range(i, ends[i])
            i = ends[i]
            continue
        character, step = raw[i], 1
        if character == "\\" and quote != "'" and i + 1 < len(raw):
            escapes = not quote or raw[i + 1] in '$`"\\\n'
            step = 2
            yield from (i,) if not escapes else ()
            yield from (i + 1,) if raw[i + 1] != "\n" else ()
        elif character in "'\"" and quote in {"", character}:
            quote = "" if quote else character
        elif not (character == "$" and not quote and raw[i + 1 : i + 2] in {"'", '"'}):
            yield i
        i += step


def without_escapes(body: str) -> list[int]:
    """The offsets of what is left of a here-document when the shell has taken escapes out."""
    gone = set[int]()
    for escape in re.finditer(r"\\[$`\\\n]", body):
        gone |= {escape.start()} if escape[0] != "\\\n" else {*range(*escape.span())}
    return [i for i in range(len(body)) if i not in gone]
