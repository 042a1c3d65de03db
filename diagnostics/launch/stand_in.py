"""Where a launch names its program, and what to write there to start a canary instead."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from diagnostics.launch.layers import Layer, is_python
from diagnostics.launch.rules.rule import Edit
from diagnostics.launch.shell import Word
from diagnostics.launch.whereabouts import path_in, value_of
from diagnostics.launch.wrappers import basename

PYTHON_VALUED = {"-W", "-X", "--check-hash-based-pycs"}
TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
# Options of torchrun that reach for other machines, or write files.
ELSEWHERE = re.compile(
    r"--(rdzv|master|node|log)[-_](endpoint|addr|rank|dir)\b|--nnodes[= ](?!1( |$))"
)


class CannotRewrite(Exception):
    """It is not safe, or not understood well enough; `reasons` name what and where."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


def stand_in(layer: Layer, canary: Path) -> Edit:
    """Put the canary where the program's name is. Raises CannotRewrite."""
    words = layer.command.words
    known = layer.values()
    values = [value_of(word, known) for word in words]
    first = values[0] or ""
    if is_python(first):
        return _python(words, values, canary)
    if basename(first) == "torchrun":
        return _torchrun(words, values, 1, canary)
    return _console_script(words[0], layer, canary)


def _python(words: Sequence[Word], values: Sequence[str | None], canary: Path) -> Edit:
    """`python -u train.py`, `python -m package`, `python -um package`."""
    i = 1
    while i < len(words):
        word, value = words[i], values[i]
        if value is None:
            raise _unsure(words, f"{word.span.text} may be options or the program")
        if value in PYTHON_VALUED:
            i += 2
        elif value == "-" or re.match(r"-[a-zA-Z]*c", value):
            raise _unsure(words, "its program is no file")
        elif re.fullmatch(r"-[a-zA-Z]*m", value):
            if i + 1 < len(words) and values[i + 1] in TORCHRUN_MODULES:
                return _torchrun(words, values, i + 2, canary)
            return Edit(word.span, f"{value[:-1]} {canary}" if len(value) > 2 else str(canary))
        elif value.startswith("-"):
            i += 1
        else:
            return Edit(word.span, str(canary))
    raise _unsure(words, "it names no program")


def _torchrun(
    words: Sequence[Word], values: Sequence[str | None], start: int, canary: Path
) -> Edit:
    """torchrun itself is run: the canary is its workers' script."""
    for word, value in zip(words[start:], values[start:], strict=True):
        if value is None:
            raise _unsure(words, f"{word.span.text} may be options or the program")
        if value.endswith(".py"):
            given = " ".join(filter(None, values[start : words.index(word)]))
            if found := ELSEWHERE.search(given):
                raise _unsure(words, f"{found[0]} reaches for more than this machine's processes")
            return Edit(word.span, str(canary))
    raise _unsure(words, "it names no .py file")


def _console_script(word: Word, layer: Layer, canary: Path) -> Edit:
    """An executable with a Python's name in its first line: the canary takes both."""
    name = word.value
    found = path_in(word, layer) if "/" in name else Path(shutil.which(name) or "")
    try:
        first = found.read_bytes().splitlines()[0].decode() if found else ""
    except (OSError, IndexError, UnicodeDecodeError):
        first = ""
    if not re.match(r"#!.*\bpython[\d.]*( |$)", first):
        raise CannotRewrite([f"{name}: not a Python program, as far as can be seen"])
    program = canary.with_name(f"canary-{basename(name)}")
    program.write_text(f"{first}\n{canary.read_text()}")
    program.chmod(0o700)
    return Edit(word.span, str(program))


def _unsure(words: Sequence[Word], why: str) -> CannotRewrite:
    return CannotRewrite([f"{' '.join(word.span.text for word in words)}: {why}"])
