"""What a Python's command line tells it to run: its own options end where the program begins."""

from collections.abc import Sequence
from dataclasses import dataclass

VALUED = "cmWX"  # of the options with one letter; -c and -m end the options
LONG_VALUED = "--check-hash-based-pycs"


@dataclass(frozen=True)
class Program:
    """What was asked of Python.

    Attributes:
        how: `-c`, `-m`, or empty for a file.
        what: the code, module or file; empty or `-` for standard input.
        flags: the letters of Python's own options that take no value.
    """

    how: str
    what: str
    flags: frozenset[str]


def program(words: Sequence[str]) -> Program:
    """Read a command line, as CPython's getopt does; its first word is the interpreter."""
    flags: set[str] = set()
    rest = iter(words[1:])
    for word in rest:
        if word == "-" or not word.startswith("-"):
            return Program("", word, frozenset(flags))
        if word == "--":
            break
        if word == LONG_VALUED:
            next(rest, "")
        elif not word.startswith("--"):
            letters, option, value = _cluster(word)
            flags.update(letters)
            value = value or (next(rest, "") if option else "")
            if option in {"-c", "-m"}:
                return Program(option, value, frozenset(flags))
    return Program("", next(rest, ""), frozenset(flags))


def _cluster(word: str) -> tuple[str, str, str]:
    """Flags, then the option that takes a value, and as much of that as is attached: `-uPcpass`."""
    for i, letter in enumerate(word):
        if letter in VALUED:
            return word[1:i], f"-{letter}", word[i + 1 :]
    return word[1:], "", ""
