"""From shell text to the values of `shell.py`, with the grammar tree-sitter-bash."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from diagnostics.launch.shell import (
    Command,
    Expansion,
    Pipeline,
    Redirect,
    Script,
    Source,
    Span,
    Text,
    Word,
    unquoted,
    without_escapes,
)

EXPANSIONS = {
    "simple_expansion",
    "expansion",
    "command_substitution",
    "arithmetic_expansion",
    "process_substitution",
}
SIMPLE = {
    "command",
    "declaration_command",
    "unset_command",
    "variable_assignment",
    "variable_assignments",
}
BLOCKS = {
    "program",
    "list",
    "subshell",
    "compound_statement",
    "do_group",
    "if_statement",
    "elif_clause",
    "else_clause",
    "for_statement",
    "c_style_for_statement",
    "while_statement",
    "case_statement",
    "case_item",
    "negated_command",
}
FUNCTION = "function_definition"
STATEMENTS = SIMPLE | BLOCKS | {"pipeline", "redirected_statement", FUNCTION}
ASSIGNMENT = "variable_assignment"
NOT_WORDS = {ASSIGNMENT, "file_redirect", "herestring_redirect", "heredoc_redirect", "comment"}
SPECIAL = re.compile(r"(?<!\\)\$[!?$]")
SEPARATORS = {"&", "&&", "||", ";"}
SAME_LEVEL = {"program", "list", "negated_command"}


def parse(text: Text) -> Script:
    """The model of a shell text. What does not parse is left out and named in `broken`."""
    # One byte a character, so that the parser's offsets are ours.
    tree = _parser().parse(text.value.encode("ascii", "replace"))
    reader = _Reader(text)
    broken = next(_errors(tree.root_node), None)
    return Script(
        text,
        tuple(reader.statements(tree.root_node, _Around())),
        dict(reader.functions(tree.root_node)),
        reader.start(tree.root_node),
        reader.code(tree.root_node),
        tuple(text.cut(n.start_byte, n.end_byte) for n in _all(tree.root_node, "comment")),
        text.span(broken.start_byte, max(broken.end_byte, broken.start_byte + 1))
        if broken
        else None,
    )


def parse_source(source: Source) -> Script:
    """The model of all that was typed."""
    return parse(Text.of(source))


@functools.cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _all(node: Node, kind: str) -> Iterator[Node]:
    if node.type == kind:
        yield node
    for child in node.children:
        yield from _all(child, kind)


def _errors(node: Node) -> Iterator[Node]:
    if node.is_error or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from _errors(child)


@dataclass(frozen=True)
class _Around:
    """What surrounds a statement: the blocks' redirects, the pipe it feeds, what follows it.

    `tail` are redirects that bind to the statement's last command.
    """

    redirects: tuple[Redirect, ...] = ()
    tail: tuple[Redirect, ...] = ()
    feeds: tuple[tuple[str, Command], ...] = ()  # each with the `|` or `|&` in front of it
    block: tuple[int, ...] = ()
    background: bool = False
    ends_with: str = ""

    def inside(self, block: int) -> "_Around":
        redirects = (*self.redirects, *self.tail)
        return replace(self, redirects=redirects, tail=(), block=(*self.block, block), ends_with="")


@dataclass(frozen=True)
class _Reader:
    text: Text

    def statements(self, node: Node, around: _Around) -> Iterator[Pipeline]:
        """Those inside a block, in the order in which they are written."""
        inner = around if node.type in SAME_LEVEL else around.inside(node.start_byte)
        found = [i for i, child in enumerate(node.children) if child.type in STATEMENTS]
        for i in found:
            last = i == found[-1]
            following = node.children[i + 1].type if i + 1 < len(node.children) else ""
            separator = following if following in SEPARATORS else ""
            yield from self.statement(
                node.children[i],
                replace(
                    inner,
                    ends_with=separator or (inner.ends_with if last else ""),
                    background=inner.background or separator == "&",
                    tail=inner.tail if last else (),
                ),
            )

    def functions(self, node: Node) -> Iterator[tuple[str, Text]]:
        """Those that are defined in no other, each with its body."""
        for child in node.children:
            name, body = (child.child_by_field_name(field) for field in ("name", "body"))
            if child.type != FUNCTION:
                yield from self.functions(child)
            elif name is not None and body is not None:
                # With its braces where they have redirects of their own, which may stand around.
                around = node if node.type == "redirected_statement" else child
                braces = body.type == "compound_statement" and body.end_byte == around.end_byte
                inside = self.text.cut(body.start_byte + braces, around.end_byte - braces)
                yield self._raw(name), inside

    def start(self, node: Node) -> Span:
        """In front of the first statement that does something."""
        first = next((c for c in node.named_children if c.type not in {"comment", FUNCTION}), node)
        return self._span(first.start_byte, first.start_byte)

    def code(self, node: Node) -> str:
        """The text without functions and comments."""
        if node.type in {"comment", FUNCTION}:
            return ""
        gaps = (node.start_byte, *(child.end_byte for child in node.children))
        starts = (*(child.start_byte for child in node.children), node.end_byte)
        between = (self.text.value[a:b] for a, b in zip(gaps, starts, strict=True))
        inside = (*map(self.code, node.children), "")
        return "".join(a + b for a, b in zip(between, inside, strict=True))

    def statement(self, node: Node, around: _Around) -> Iterator[Pipeline]:
        if node.type == FUNCTION:
            return
        if node.type in BLOCKS:
            yield from self.statements(node, around)
        elif node.type == "pipeline":
            yield from self._pipeline(node, around)
        elif node.type == "redirected_statement":
            yield from self._redirected(node, around)
        else:
            yield _pipeline_of(self._command(node, around), around)

    def _pipeline(self, node: Node, around: _Around) -> Iterator[Pipeline]:
        feeds = (*self._feeds(node, around.tail), *around.feeds)
        first = next(child for child in node.children if child.type in STATEMENTS)
        yield from self.statement(first, replace(around, feeds=feeds, tail=()))

    def _feeds(self, node: Node, tail: tuple[Redirect, ...]) -> Iterator[tuple[str, Command]]:
        """What stands behind the pipes of a pipeline."""
        stages = [child for child in node.children if child.type in STATEMENTS]
        for pipe, stage in pairwise(node.children):
            if pipe.type in {"|", "|&"} and stage.type in STATEMENTS:
                own_tail = tail if stage is stages[-1] else ()
                command = self._first(stage, _Around(tail=own_tail))
                if command is not None:
                    yield pipe.type, command

    def _first(self, node: Node, around: _Around) -> Command | None:
        pipeline = next(self.statement(node, around), None)
        return pipeline.commands[0] if pipeline else None

    def _redirected(self, node: Node, around: _Around) -> Iterator[Pipeline]:
        body = node.child_by_field_name("body")
        redirects = tuple(self._redirects(node))
        tail = (*redirects, *around.tail)
        if body is None:
            yield from self._bare(node, replace(around, tail=tail))
            return
        piped = next((p for h in node.children for p in _children(h, "pipeline")), None)
        if piped is not None:  # `cat <<EOF | ssh host bash`: the grammar hangs the pipe in there
            around = replace(around, feeds=(*self._feeds(piped, ()), *around.feeds))
        yield from self.statement(body, replace(around, tail=tail))

    def _bare(self, node: Node, around: _Around) -> Iterator[Pipeline]:
        """A statement that is nothing but redirects: `> file`."""
        span = self._span(node.start_byte, node.end_byte)
        yield _pipeline_of(Command((), (), (*around.redirects, *around.tail), span), around)

    def _command(self, node: Node, around: _Around) -> Command:
        assigned = [node] if node.type == ASSIGNMENT else _children(node, ASSIGNMENT)
        words = [] if "assignment" in node.type else self._words(node)
        own = tuple(self._redirects(node))
        return Command(
            tuple(words),
            tuple(self._assignment(child) for child in assigned),
            (*around.redirects, *own, *around.tail),
            self._span(node.start_byte, node.end_byte),
        )

    def _assignment(self, node: Node) -> tuple[str, Word]:
        name = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        assert name is not None
        start = value.start_byte if value else node.end_byte
        return self._raw(name), self._word(start, node.end_byte, node)

    def _words(self, node: Node) -> list[Word]:
        """Neighbours that nothing separates are one word, whatever the grammar makes of them."""
        ranges: list[list[int]] = []
        for child in node.children:
            if child.type in NOT_WORDS or child.start_byte == child.end_byte:
                continue
            gap = self.text.value[ranges[-1][1] : child.start_byte] if ranges else " "
            if re.fullmatch(r"(\\.)*", gap, re.DOTALL):
                ranges[-1][1] = child.end_byte
            else:
                ranges.append([child.start_byte, child.end_byte])
        return [self._word(start, end, node) for start, end in ranges]

    def _redirects(self, node: Node) -> Iterator[Redirect]:
        for child in node.children:
            if child.type == "file_redirect":
                yield self._file_redirect(child)
            elif child.type == "herestring_redirect":
                word = self._word(child.children[-1].start_byte, child.end_byte, child)
                yield Redirect("<<<", 0, word, word.span, body=word.text)
            elif child.type == "heredoc_redirect":
                yield from self._redirects(child)
                yield self._heredoc(child)

    def _file_redirect(self, node: Node) -> Redirect:
        descriptor, destination = (
            node.child_by_field_name(name) for name in ("descriptor", "destination")
        )
        operator = next(child.type for child in node.children if not child.is_named)
        into: tuple[Command, ...] = ()
        if destination is not None and destination.type == "process_substitution":
            inside = self.statements(destination, _Around())
            into = tuple(command for pipeline in inside for command in pipeline.commands)
        fd = self._raw(descriptor) if descriptor else ""
        return Redirect(
            operator,
            int(fd) if fd.isdecimal() else 0 if operator.startswith("<") else 1,
            self._word(destination.start_byte, destination.end_byte, destination)
            if destination
            else None,
            self._span(node.start_byte, node.end_byte),
            into,
        )

    def _raw(self, node: Node) -> str:
        return self.text.value[node.start_byte : node.end_byte]

    def _heredoc(self, node: Node) -> Redirect:
        mark = next(iter(_children(node, "heredoc_start")), node)
        close = next(iter(_children(node, "heredoc_end")), None)
        # Not the body's own offsets: the grammar loses one that begins with a backslash.
        start = self.text.value.find("\n", mark.end_byte) + 1
        end = max(start, close.start_byte if close else node.end_byte)
        word = self._word(mark.start_byte, mark.end_byte, mark)
        text = self.text.cut(start, end)
        found: tuple[Expansion, ...] = ()
        if not word.quoted:
            # The grammar sees no special variables in there.
            special = SPECIAL.finditer(text.value)
            found = (
                *self._expansions(node, start, end),
                *(Expansion(m[0][1:], text.span(*m.span())) for m in special),
            )
            text = text.pick(without_escapes(text.value))
        held = Word(text, text.span(), found, word.quoted)
        return Redirect("<<", 0, held, word.span, body=text)

    def _word(self, start: int, end: int, node: Node) -> Word:
        """The characters `start` to `end`, which lie in this node."""
        start += len(self.text.value[start:end]) - len(self.text.value[start:end].lstrip())
        expansions = self._expansions(node, start, end)
        raw = self.text.value[start:end]
        kept = unquoted(raw, [(a - start, b - start) for a, b in self._ranges(node, start, end)])
        return Word(
            self.text.pick(start + i for i in kept),
            self._span(start, end),
            expansions,
            quoted=any(c in raw for c in "'\"\\"),
        )

    def _expansions(self, node: Node, start: int, end: int) -> tuple[Expansion, ...]:
        return tuple(
            Expansion(self.text.value[a:b].strip("${}"), self._span(a, b))
            for a, b in self._ranges(node, start, end)
        )

    def _ranges(self, node: Node, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where expansions lie between two offsets; those inside others are left out."""
        if node.end_byte <= start or node.start_byte >= end:
            return
        if node.type in EXPANSIONS:
            raw = self._raw(node)
            yield node.start_byte + len(raw) - len(raw.lstrip()), node.end_byte
            return
        for child in node.children:
            yield from self._ranges(child, start, end)

    def _span(self, start: int, end: int) -> Span:
        return self.text.span(start, end)


def _pipeline_of(first: Command, around: _Around) -> Pipeline:
    return Pipeline(
        (first, *(command for _, command in around.feeds)),
        tuple(pipe for pipe, _ in around.feeds),
        around.ends_with,
        around.background,
        around.block,
    )


def _children(node: Node, kind: str) -> list[Node]:
    return [child for child in node.children if child.type == kind]
