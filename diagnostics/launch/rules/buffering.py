"""Output that stays in the program's memory and dies with it."""

import difflib
import os
import re
from collections.abc import Iterator

from diagnostics.launch.layers import Chain, Launch, Layer, is_python
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, behind
from diagnostics.launch.shell import Span, Word
from diagnostics.launch.streams import streams
from diagnostics.launch.whereabouts import value_of
from diagnostics.launch.wrappers import split_options

NAME = "PYTHONUNBUFFERED"
ALIKE = 0.85
UNBUFFERED_MODULES = {"torch.distributed.run", "torch.distributed.launch", "dflash"}
PYTHON_VALUED = {"-c", "-m", "-W", "-X", "--check-hash-based-pycs"}


def _python(launch: Launch) -> Iterator[tuple[Chain, Layer]]:
    """The training programs that are Python interpreters, each once."""
    for chain in launch.trainers:
        argv = chain.program.command.argv
        if argv and is_python(argv[0]):
            yield chain, chain.program


def _buffered(launch: Launch) -> Iterator[Hit]:
    for chain, layer in _python(launch):
        kind = streams(chain)[-1].out.kind
        options, _ = split_options(layer.command.words[1:], PYTHON_VALUED.__contains__)
        module = options.get("-m")
        if kind not in {"file", "pipe"} or "-u" in options:
            continue
        if module is not None and module.value in UNBUFFERED_MODULES:
            continue
        if not _unbuffered(_environment(chain).get(NAME), chain):
            word = layer.command.words[0]
            yield Hit(
                word.span,
                f"{word.value} writes to a {kind} without -u",
                edits=(Edit(behind(word.span), " -u"),),
            )


def _environment(chain: Chain) -> dict[str, Word]:
    """The variables given to the program: exported, or in front of one of the layers."""
    known: dict[str, Word] = {}
    for layer in chain.layers:
        known |= {name: word for name, word, bare in _assigned(layer) if not bare}
    return known


def _assigned(layer: Layer) -> Iterator[tuple[str, Word, bool]]:
    """Name, value, and whether it is a bare `NAME=value` that no `export` follows."""
    exported = set[str]()
    earlier = [*layer.shell.commands(layer.pipeline)]
    for command in earlier:
        if command.argv[:1] == ["export"] or command.argv[:2] == ["declare", "-x"]:
            exported |= {*command.argv[1:], *(name for name, _ in command.assignments)}
        elif command.argv[:1] == ["set"] and {"-a", "allexport"} & {*command.argv}:
            exported |= {name for c in earlier for name, _ in c.assignments}
    if layer.own:
        for command in earlier:
            if not command.words or command.argv[0] in {"export", "declare"}:
                yield from ((n, w, n not in exported) for n, w in command.assignments)
    yield from ((name, word, False) for name, word in layer.command.assignments)


def _unbuffered(word: Word | None, chain: Chain) -> bool:
    """What Python makes of the variable: any text but an empty one or a number 0 counts."""
    if word is None:
        near = not any(layer.handed and layer.handed.detached for layer in chain.layers)
        value = os.environ.get(NAME, "") if near and chain.program.place.here else ""
    else:
        value = value_of(word, chain.program.values()) or word.value
    return value != "" and not re.fullmatch(r"[+-]?0+", value)


def _misspelt(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for name, word, bare in (x for layer in launch.training_layers for x in _assigned(layer)):
        start = word.span.source.text.rfind(name, 0, word.span.start)
        where = Span(word.span.source, start, max(word.span.end, start + len(name) + 1))
        if where in seen or not _like(name):
            continue
        seen.add(where)
        yield from _wrong_setting(name, word, bare, where)


def _like(name: str) -> bool:
    return difflib.SequenceMatcher(None, name, NAME).ratio() >= ALIKE


def _wrong_setting(name: str, word: Word, bare: bool, where: Span) -> Iterator[Hit]:
    if name != NAME:
        edit = Edit(Span(where.source, where.start, where.start + len(name)), NAME)
        yield Hit(where, f"Python does not know {name}", edits=(edit,))
    elif re.fullmatch(r"[+-]?0*", word.value):
        shown = word.value or "nothing"
        yield Hit(where, f"{shown} means buffered", edits=(Edit(where, f"{NAME}=1"),))
    elif bare:
        edit = Edit(Span(where.source, where.start, where.start), "export ")
        yield Hit(where, "without export, Python does not see it", edits=(edit,))


def _stdbuf(launch: Launch) -> Iterator[Hit]:
    for chain, _ in _python(launch):
        for layer in chain.layers:
            if layer.name == "stdbuf":
                yield Hit(layer.command.words[0].span, "Python does not use C's buffers")


def _conda_run(launch: Launch) -> Iterator[Hit]:
    for layer in _without(launch, "conda run", {"--no-capture-output", "--live-stream", "-s"}):
        word = layer.command.words[1]
        edit = Edit(behind(word.span), " --no-capture-output")
        yield Hit(word.span, "conda run shows output when all is over", edits=(edit,))


def _typescript(launch: Launch) -> Iterator[Hit]:
    for layer in _without(launch, "script", {"-f", "--flush"}):
        word = layer.command.words[0]
        edit = Edit(behind(word.span), " -f")
        yield Hit(word.span, "script writes its file in blocks", edits=(edit,))


def _without(launch: Launch, name: str, options: set[str]) -> Iterator[Layer]:
    """The wrappers of this name that have none of these options."""
    for layer in launch.training_layers:
        given = layer.handed.options.keys() if layer.handed else set()
        if layer.name == name and not options & given:
            yield layer


RULES = (
    Rule(
        "DL011",
        "standard output is block-buffered",
        Severity.TAIL,
        "Into a file or pipe Python writes 8 KiB at a time (128 KiB since 3.14): a signal,"
        " os._exit or a crash takes the last lines with it, and a hang shows none of them.",
        "python train.py >> train.log 2>&1",
        "python -u train.py >> train.log 2>&1",
        "the program logs through logging, flushes every line itself, or gets PYTHONUNBUFFERED"
        " from its image or a file that cannot be read here.",
        _buffered,
    ),
    Rule(
        "DL012",
        "PYTHONUNBUFFERED has no effect",
        Severity.TAIL,
        "Python wants exactly this name, exported, with a value that is neither empty nor 0;"
        " anything else is ignored without a word.",
        "PYTHONUNBUFFERED=0 python -u train.py >> train.log 2>&1",
        "PYTHONUNBUFFERED=1 python -u train.py >> train.log 2>&1",
        "the output is meant to be buffered.",
        _misspelt,
    ),
    Rule(
        "DL013",
        "stdbuf does nothing for Python",
        Severity.MISLEADS,
        "stdbuf changes the buffers of the C library, and Python has its own: only -u and"
        " PYTHONUNBUFFERED help.",
        "stdbuf -oL python -u train.py >> train.log 2>&1",
        "python -u train.py >> train.log 2>&1",
        "the Python program starts C programs that print.",
        _stdbuf,
    ),
    Rule(
        "DL014",
        "conda run holds the output back",
        Severity.TAIL,
        "It collects the output and prints it when the program has ended: nothing is in the log"
        " before, and nothing at all if conda is killed.",
        "conda run -n train python -u train.py >> train.log 2>&1",
        "conda run --no-capture-output -n train python -u train.py >> train.log 2>&1",
        "the program is short.",
        _conda_run,
    ),
    Rule(
        "DL034",
        "script without -f",
        Severity.TAIL,
        "script(1) buffers what it writes to its file: if it is killed, the last lines are gone.",
        "script -a -q -e -c 'python -u train.py' train.log",
        "script -f -a -q -e -c 'python -u train.py' train.log",
        "it is only meant for looking at afterwards.",
        _typescript,
    ),
)
