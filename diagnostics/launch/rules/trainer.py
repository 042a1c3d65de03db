"""The words of `dflash train` itself: whether it would take them, and what they name exists."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from diagnostics.launch.layers import Launch, Layer
from diagnostics.launch.rules.rule import Hit, Rule, Severity
from diagnostics.launch.shell import Word
from diagnostics.launch.whereabouts import path_in, said_path, value_of

ANSWER_S = 30.0
USAGE = 2
PATHS = ("--target-model", "--data-dir", "--config", "--eval-data", "--init-from")
FLAG = re.compile(r"--[a-z][a-z0-9-]+")


def _refused(launch: Launch) -> Iterator[Hit]:
    for chain in launch.trainers:
        words = _train_words(chain.program)
        if words:
            yield from _missing(words, chain.program)
            yield from _wrong_options(words, chain.program)


def _train_words(layer: Layer) -> Sequence[Word]:
    """What stands behind `dflash train` or `python -m dflash train`; nothing for others."""
    words = layer.command.words
    values = [word.value for word in words]
    for i, value in enumerate(values[:-1]):
        if value.rpartition("/")[2] == "dflash" and values[i + 1] == "train":
            return words[i + 2 :]
    return ()


def _missing(words: Sequence[Word], layer: Layer) -> Iterator[Hit]:
    for flag, word in pairwise(words):
        if flag.value not in PATHS:
            continue
        path = path_in(word, layer)
        if path is None:
            what = f"whether {flag.value} {word.value} exists there cannot be seen from here"
            ask = f"test -e {said_path(word, layer)} && echo there"
            yield Hit(word.span, what, instead=ask, unknown=True)
        elif not path.exists():
            yield Hit(word.span, f"{flag.value}: there is no {path}", instead="a path that exists")


def _wrong_options(words: Sequence[Word], layer: Layer) -> Iterator[Hit]:
    """`dflash config` takes the same options and checks them, without loading anything."""
    known = layer.values()
    values = [value_of(word, known) for word in words]
    if None in values:
        word = words[values.index(None)]
        what = f"what {word.value} stands for is not said in the launch"
        ask = "dflash config with the same options and the values in their place"
        yield Hit(word.span, what, instead=ask, unknown=True)
        return
    asked = [v for v in values if v is not None and v != "--rehearse"]
    if "--config" in asked[:-1]:
        where = asked.index("--config") + 1
        file = path_in(words[where], layer)
        if file is None or not file.is_file():
            return  # `_missing` has said so
        asked[where] = str(file)
    answer = _answer([sys.executable, "-m", "dflash", "config", *asked])
    if answer is None or answer.returncode not in (0, USAGE):
        what = "dflash config gave no answer about these options"
        yield Hit(words[0].span, what, instead="dflash config with the same options", unknown=True)
    elif answer.returncode == USAGE:
        said = answer.stderr.partition("Error: ")[2].strip().splitlines() or ["it is refused"]
        yield Hit(_blamed(words, said[0]).span, said[0], instead=" ".join(said[1:]))


def _answer(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """None if there is none in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _blamed(words: Sequence[Word], said: str) -> Word:
    """The option that the message names, else the first word."""
    named = FLAG.findall(said)
    return next((word for word in words if word.value in named), words[0])


RULES = (
    Rule(
        code="DL036",
        title="dflash train would refuse this",
        severity=Severity.RUN,
        why="It ends at once with a usage error, or while it loads: at night nobody sees it until "
        "the morning.",
        wrong="python3 -u -m dflash train --target-model /workspace --data-dir /workspace "
        "--output-dir /workspace/out --block-size 1 >> /workspace/train.log 2>&1",
        right="python3 -u -m dflash train --target-model /workspace --data-dir /workspace "
        "--output-dir /workspace/out --block-size 16 >> /workspace/train.log 2>&1",
        ignore="another version of dflash runs there, with other options.",
        find=_refused,
    ),
)
