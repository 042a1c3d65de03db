"""Output that stays in the program's memory and dies with it."""

import difflib
import os
import re
from collections.abc import Iterator
from itertools import pairwise

from diagnostics.launch.layers import Chain, Launch, Layer, is_python
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, behind
from diagnostics.launch.shell import Span, Word
from diagnostics.launch.streams import streams
from diagnostics.launch.whereabouts import value_of
from diagnostics.launch.wrappers import Handed, split_options

NAME = "PYTHONUNBUFFERED"
ALIKE = 0.85
BUFFERS = re.compile(r"([+-]?0+)?")  # to Python, any other text counts
UNSETS = re.compile(rf"(-u ?|--unset[= ]){NAME}( |$)")
APPTAINERS = {"apptainer exec", "singularity exec"}
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
        if BUFFERS.fullmatch(_found(chain)):
            word = layer.command.words[0]
            yield Hit(
                word.span,
                f"{word.value} writes to a {kind} without -u",
                edits=(Edit(behind(word.span), " -u"),),
            )


def _found(chain: Chain) -> str:
    """What the program finds in the variable, through all that clears the environment."""
    near = not any(layer.handed and layer.handed.detached for layer in chain.layers)
    found = os.environ.get(NAME, "") if near else ""
    for layer in chain.layers:
        if layer.own and _unset(layer):
            found = ""
        for name, word, bare in _assigned(layer):
            if name == NAME and not bare:
                found = value_of(word, layer.values()) or word.value
        if layer.handed and not _passes(layer.name, layer.command.argv, layer.handed):
            found = ""
    return found


def _unset(layer: Layer) -> bool:
    commands = layer.shell.settings(layer.pipeline)
    return any(c.argv[:1] == ["unset"] and NAME in c.argv for c in commands)


def _passes(wrapper: str, argv: list[str], handed: Handed) -> bool:
    """Whether a wrapper lets the variable through."""
    given = {*handed.options}
    if wrapper == "env":
        return not ({"-i", "--ignore-environment"} & given or UNSETS.search(" ".join(argv)))
    if wrapper in {"sudo", "doas"}:
        kept = handed.options.get("--preserve-env")
        return "-E" in given or ("--preserve-env" in given and (not kept or NAME in kept.value))
    if wrapper in {"su", "runuser"}:
        return not {"-", "-l", "--login"} & {*argv}
    if wrapper in {"srun", "sbatch"}:
        exported = handed.options.get("--export")
        return not exported or any(name in exported.value for name in ("ALL", NAME))
    if wrapper in APPTAINERS:
        return not {"-e", "--cleanenv", "-C", "--containall"} & given
    if wrapper == "lxc-attach":
        return "--clear-env" not in given
    named = any(option in {"-e", "--env"} and name == NAME for option, name in pairwise(argv))
    return not handed.hop or wrapper == "chroot" or named


def _assigned(layer: Layer) -> Iterator[tuple[str, Word, bool]]:
    """Name, value, and whether it is a bare `NAME=value` that no `export` follows."""
    exported = set[str]()
    given: list[tuple[str, Word]] = []
    earlier = [*layer.shell.settings(layer.pipeline)]
    for command in earlier:
        if command.argv[:1] == ["unset"]:
            given = [(name, word) for name, word in given if name not in command.argv]
        elif not command.words or command.argv[0] in {"export", "declare"}:
            given += command.assignments
        if command.argv[:1] == ["export"] or command.argv[:2] == ["declare", "-x"]:
            exported |= {*command.argv[1:], *(name for name, _ in command.assignments)}
        elif command.argv[:1] == ["set"] and {"-a", "allexport"} & {*command.argv}:
            exported |= {name for c in earlier for name, _ in c.assignments}
    if layer.own:
        yield from ((name, word, name not in exported) for name, word in given)
    yield from ((name, word, False) for name, word in layer.command.assignments)


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
