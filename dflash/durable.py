"""Directories that are there whole or not at all, whatever ends the process or the machine.

A name that starts with a dot is unfinished: `.writing-NAME` on its way in, `.deleting-NAME` on its
way out. Standard library only.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

WRITING, DELETING = ".writing-", ".deleting-"


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A hidden directory to write files into, which gets the name `final` when the block ends well.

    Files and directory are synced before the rename, the parent after it. A directory called
    `final` is replaced. If the block raises, nothing is left; after a kill, `.writing-NAME` is.
    """
    staging = final.with_name(WRITING + final.name)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        for path in (*staging.iterdir(), staging):
            fsync(path)
        if final.exists():
            remove(final)
        staging.rename(final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync(final.parent)


def remove(directory: Path) -> None:
    """Delete a directory; killed halfway, it leaves no half of it under its name."""
    hidden = directory.with_name(DELETING + directory.name)
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden)


def sweep(parent: Path) -> None:
    """Delete what a process that was killed left unfinished in `parent`."""
    for prefix in (WRITING, DELETING):
        for path in parent.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object, indented; durable only within `staged`."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def drop_torn_line(file: IO[bytes]) -> int:
    """Cut off what follows the last newline: a line that a process was killed in.

    Returns how many lines there are.
    """
    file.seek(0)
    lines = whole = 0
    for line in file:
        if line.endswith(b"\n"):
            lines, whole = lines + 1, whole + len(line)
    file.truncate(whole)
    return lines


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
