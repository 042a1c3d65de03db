"""Places that hold code: here, under another root, or behind a command such as `ssh host`."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnostics.deploy import fingerprint
from diagnostics.prefix import behind as behind_prefix

LIMIT_S = 150.0
TEXT, NUMBER, OBJECT = (str, "text"), ((int, float), "a number"), (dict, "an object")
FIELDS = {"directory": TEXT, "host": TEXT, "files": OBJECT}  # of those that are compared
FILE_FIELDS = {"sha256": TEXT, "mtime": NUMBER}
SHOWN = 40


class Unreachable(Exception):
    """The place could not be looked at; `remedy` says what would help."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def here(what: str, names: Sequence[str] = (), root: Path | None = None) -> dict[str, Any]:
    """The fingerprint of a directory or package of this machine, or of another root's directory.

    Raises Unreachable.
    """
    if root is not None and not os.path.isabs(what):
        raise Unreachable(f"--root {root}: {what} must be an absolute directory there")
    top = str(root or "")
    directory = fingerprint.locate(what, top)
    if directory is None:
        raise Unreachable(
            f"{top}{what} is neither a directory nor a package that can be imported here",
            "Give a directory, or a package by the name it is imported by, such as dflash.",
        )
    try:
        return fingerprint.fingerprint(directory, names, top)
    except OSError as error:
        raise Unreachable(f"{error.filename}: {error.strerror}", "Run this as root.") from error


def behind(prefix: str, what: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """The fingerprint where `prefix` leads, which needs python3 and nothing else there.

    Raises Unreachable.
    """
    source = Path(fingerprint.__file__).read_text(encoding="utf-8")
    found = answer_behind(prefix, source, json.dumps({"what": what, "names": [*names]}))
    if "missing" in found:
        raise Unreachable(f"{what} is not on {found.get('host')}, behind {prefix!r}")
    if wrong := flaw(found, bytecode=OBJECT, defines=OBJECT):
        raise Unreachable(f"--exec-in {prefix!r}: what it said is no fingerprint: {wrong}")
    return found


def flaw(read: Any, **more: tuple[Any, str]) -> str:
    """What is not as in a fingerprint that also has these fields; empty if all is."""
    if wrong := _flaw(read, FIELDS | more):
        return wrong
    wrongs = {path: _flaw(file, FILE_FIELDS) for path, file in read["files"].items()}
    return next((f"{path}: {wrong}" for path, wrong in wrongs.items() if wrong), "")


def _flaw(read: Any, fields: Mapping[str, tuple[Any, str]]) -> str:
    if not isinstance(read, dict):
        return f"{repr(read)[:SHOWN]} is not an object"
    for name, (kind, what) in fields.items():
        if not isinstance(read.get(name), kind):
            return f"{name} is {repr(read.get(name))[:SHOWN]}, not {what}"
    return ""


def answer_behind(prefix: str, source: str, *arguments: str) -> dict[str, Any]:
    """What a program prints there as JSON; it goes there through python3's standard input.

    Raises Unreachable.
    """
    try:
        command = behind_prefix(shlex.split(prefix), ["python3", "-", *arguments])
    except ValueError as error:
        raise Unreachable(f"--exec-in {prefix!r}: {error}", "Close each quote.") from error
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except FileNotFoundError as error:
        raise Unreachable(f"--exec-in {prefix!r}: there is no command {command[0]!r}") from error
    except OSError as error:
        said = f"{command[0]!r} cannot be started: {error.strerror}"
        raise Unreachable(f"--exec-in {prefix!r}: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"--exec-in {prefix!r}: no answer within {LIMIT_S:g} s") from error
    return _answer(prefix, done)


def _answer(prefix: str, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise Unreachable(
            f"--exec-in {prefix!r}: exit status {done.returncode}, and it said: {said[0]}",
            f"Try: {prefix} python3 --version",
        )
    return found
