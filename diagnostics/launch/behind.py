"""Run `onsite`, the trainer's side, behind a prefix such as `pct exec 200 --` or `ssh host`."""

import json
import shlex
import subprocess
from collections.abc import Sequence

from diagnostics.launch import onsite
from diagnostics.launch.journal import parsed
from diagnostics.launch.onsite import Record
from diagnostics.prefix import behind


class Unreachable(Exception):
    """The other side did not answer: the message says what happened instead."""


def through(prefix: Sequence[str], python: str, verb: str, asked: Record) -> list[str]:
    """The words that do it."""
    with open(onsite.__file__, encoding="utf-8") as file:
        return behind(prefix, [python, "-I", "-c", file.read(), verb, json.dumps(asked)])


def ask(prefix: Sequence[str], python: str, verb: str, asked: Record, *, within_s: float) -> Record:
    """What `onsite` answers there. Raises Unreachable."""
    words, null = through(prefix, python, verb, asked), subprocess.DEVNULL
    shown = shlex.join([*prefix, python])
    try:
        ended = subprocess.run(words, stdin=null, capture_output=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{shown} did not answer within {within_s:g} s") from None
    except OSError as error:
        raise Unreachable(f"{words[0]} cannot be run: {error.strerror}") from None
    for line in reversed(ended.stdout.decode(errors="replace").splitlines()):
        if answer := parsed(line):
            return answer
    text = (ended.stderr or ended.stdout).decode(errors="replace").strip()
    said = (text.splitlines() or ["nothing"])[-1]
    raise Unreachable(f"{shown} ended with {ended.returncode} and said: {said[-200:]}")
