"""The directory of the log: whether it is there when the log is opened."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Launch, Layer
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before
from diagnostics.launch.shell import Command, Pipeline, Word
from diagnostics.launch.streams import all_logs
from diagnostics.launch.whereabouts import (
    entered,
    is_relative,
    may_be_made,
    parent_of,
    path_in,
    said_path,
    value_of,
    working_directory,
)
from diagnostics.launch.wrappers import split_options

ALTERNATIVES = re.compile(r"(?<!\$)\{([^{}]*,[^{}]*)\}")
NOT_ENTERED = (
    "The shell does not get there: what stands behind && never runs, and all else runs, and opens"
    " the log, where the shell stood before."
)


def directory_word(word: Word) -> Word:
    """The word up to its last slash, or `.`: what must exist before the log can be opened."""
    end = word.value.rfind("/")
    if end < 0:
        return Word(word.text.cut(0, 0), before(word.span))
    text = word.text.cut(0, max(end, 1))
    covered = text.span()
    inside = tuple(e for e in word.expansions if covered.covers(e.span))
    return Word(text, covered, inside, word.quoted)


def directory_of(word: Word, layer: Layer) -> Path | None:
    """The log's directory as seen from here; None if that cannot be known."""
    if (typed := directory_word(word)).value:
        return path_in(typed, layer)
    if value_of(word, layer.values()) is not None:
        path = path_in(word, layer)
        return path.parent if path else None
    # `$LOG` may be a whole path, `train-$SEED.log` is a name.
    return working_directory(layer, layer.place) if is_relative(word.value) else None


def _said_directory(word: Word, layer: Layer) -> str:
    """The log's directory as the launch says it; empty if it says nothing."""
    if (typed := directory_word(word)).value:
        return said_path(typed, layer)
    said = said_path(word, layer)
    return os.path.dirname(said) or ("" if is_relative(said) else said)


def made(said: str, layer: Layer, at: Pipeline) -> bool:
    """Whether a `mkdir` in front of `at`, or of a shell around, makes what is so called."""
    wanted = Path(os.path.normpath(said))
    for each in (*layer.shell.opened_by, layer):
        if each.own and each.place.hops == layer.place.hops:
            for _, step in each.shell.earlier(at if each is layer else each.pipeline):
                for word in _made_by(step.command):
                    path = said_path(word, step)
                    found = [Path(os.path.normpath(one)) for one in _alternatives(path)]
                    if any(wanted in (one, *one.parents) for one in found):
                        return True
                    if word.expansions and parent_of(word.value) == re.sub(r"[{}]", "", said):
                        return True
    return False


def _made_by(command: Command) -> list[Word]:
    """The operands of `mkdir` and `install -d`."""
    words = command.words[1:] if command.argv[:1] in (["mkdir"], ["install"]) else ()
    options, rest = split_options(words, {"-m", "-o", "-g", "--mode"}.__contains__)
    makes = command.argv[:1] == ["mkdir"] or {"-d", "--directory"} & options.keys()
    return [word for word in rest if not word.value.startswith("-")] if makes else []


def _alternatives(path: str) -> list[str]:
    """What a shell makes of `runs/{a,b}`."""
    found = ALTERNATIVES.search(path)
    if found is None:
        return [path]
    front, behind = path[: found.start()], path[found.end() :]
    each = [f"{front}{one}{behind}" for one in found[1].split(",")]
    return [text for one in each for text in _alternatives(one)]


def _missing(launch: Launch, writer: str) -> Iterator[Hit]:
    found = [log for log in all_logs(launch) if (log.writer == "tee") == (writer == "tee")]
    yield from filter(None, (_not_there(log.word, log.layer) for log in found if log.word))


def _not_there(word: Word, layer: Layer) -> Hit | None:
    if lost := _lost_on_the_way(word, layer):
        return lost
    said, directory = _said_directory(word, layer), directory_of(word, layer)
    if (said and made(said, layer, layer.pipeline)) or (directory and directory.is_dir()):
        return None
    if directory is None:
        return _cannot_check(word, layer, said)
    what, typed = f"there is no directory {directory}", directory_word(word)
    pipeline = layer.pipeline
    elsewhere = typed.span.source != pipeline.span.source  # in a `#SBATCH` line
    if not typed.value or elsewhere:  # all of the path stands in a variable
        return Hit(word.span, what, instead=f"put in front: mkdir -p {said}")
    then = "; " if pipeline.background else " && "  # `a && b & echo $!` is another process
    make = Edit(before(pipeline.span), f"mkdir -p {typed.span.text}{then}")
    return Hit(typed.span, what, edits=(make,))


def _lost_on_the_way(word: Word, layer: Layer) -> Hit | None:
    """A `cd` in front, into a directory that does not exist, where the log's path depends on it."""
    here = working_directory(layer, layer.place)
    if here is None or not is_relative(value_of(word, layer.values()) or word.value):
        return None
    for way in entered(layer, layer.place):
        missing = way.path in (here, *here.parents) and not way.path.is_dir()
        if way.word and missing and not made(way.said, way.layer, way.at):
            return Hit(
                way.word.span,
                f"there is no directory {way.path}",
                why=NOT_ENTERED,
                instead=f"a directory that exists, or in front: mkdir -p {way.word.span.text}",
                unknown=may_be_made(way.layer, way.at),
            )
    return None


def _cannot_check(word: Word, layer: Layer, said: str) -> Hit:
    shown = said or "the directory it starts in"
    typed = directory_word(word).value
    unwritten = layer.place.here and "$" in shown
    if unwritten and typed:
        instead = f"put in front: mkdir -p {typed}"
    elif said == word.value:
        instead = "check it again with its value in its place"
    elif " " in shown:
        instead = "type there: pwd; df -h ."
    else:
        instead = f"type there: test -w {shown} && df -h {shown}"
    what = f"{shown} on {layer.place} cannot be looked at from here"
    if unwritten:
        what = f"the value of {shown} is not written in the launch"
    return Hit(word.span, what, instead=instead, unknown=True)


def _missing_for_redirect(launch: Launch) -> Iterator[Hit]:
    return _missing(launch, "redirect")


def _missing_for_tee(launch: Launch) -> Iterator[Hit]:
    return _missing(launch, "tee")


RULES = (
    Rule(
        "DL001",
        "the log's directory does not exist",
        Severity.RUN,
        "The shell opens the log before it starts anything: without the directory the trainer"
        " never starts, and inside a detached tmux nobody sees the message.",
        "tmux new-session -d -s train \\\n"
        "  'python -u train.py >> /no-such-directory/train.log 2>&1' \\; set remain-on-exit on",
        "tmux new-session -d -s train \\\n"
        "  'mkdir -p /tmp/runs && exec python -u train.py >> /tmp/runs/train.log 2>&1' \\;"
        " set remain-on-exit on",
        "something makes the directory before the launch.",
        _missing_for_redirect,
    ),
    Rule(
        "DL006",
        "tee writes into a directory that does not exist",
        Severity.LOG,
        "tee complains once on the terminal and passes everything on: the trainer runs, without"
        " any log.",
        "set -o pipefail; python -u train.py 2>&1 | tee -a /no-such-directory/train.log",
        "mkdir -p /tmp/runs && set -o pipefail;"
        " python -u train.py 2>&1 | tee -a /tmp/runs/train.log",
        "something makes the directory before the launch.",
        _missing_for_tee,
    ),
)
