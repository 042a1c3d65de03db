"""The path of the log: whether it can be opened, what was in it before, and where it leads."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Launch, Layer
from diagnostics.launch.rules.directories import directory_of
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, behind
from diagnostics.launch.shell import Span, Word
from diagnostics.launch.streams import Log, all_logs
from diagnostics.launch.whereabouts import (
    is_relative,
    path_in,
    said_path,
    value_of,
    working_directory,
)

FULL_BYTES = 16 << 20
FULL_INODES = 16


def _existing(launch: Launch) -> Iterator[tuple[Log, Word, Path]]:
    """The logs whose directory exists and can be seen from here."""
    for log in all_logs(launch):
        directory = directory_of(log.word, log.layer) if log.word else None
        if log.word and directory and directory.is_dir():
            yield log, log.word, directory


def _unwritable(launch: Launch) -> Iterator[Hit]:
    for log, word, directory in _existing(launch):
        path = path_in(word, log.layer)
        if path and path.is_dir():
            yield Hit(word.span, f"{path} is a directory")
        elif os.statvfs(directory).f_flag & os.ST_RDONLY:
            yield Hit(word.span, f"{directory} is on a file system that is mounted read-only")
        elif path and path.exists() and not os.access(path, os.W_OK):
            yield Hit(word.span, f"you may not write to {path}")
        elif not (path and path.exists()) and not os.access(directory, os.W_OK | os.X_OK):
            yield Hit(word.span, f"you may not make files in {directory}")


def _full(launch: Launch) -> Iterator[Hit]:
    for _, word, directory in _existing(launch):
        room = os.statvfs(directory)
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < FULL_BYTES:
            yield Hit(word.span, f"{free / 2**20:.1f} MiB are free where {directory} lies")
        elif room.f_files and room.f_favail < FULL_INODES:
            yield Hit(word.span, f"no more files can be made where {directory} lies (inodes)")


def _reused(launch: Launch) -> Iterator[Hit]:
    for log in all_logs(launch):
        if log.word is None or log.appends or value_of(log.word, log.layer.values()) is None:
            continue
        if _noclobber(log):
            continue
        path = path_in(log.word, log.layer)
        size = path.stat().st_size if path and path.is_file() else 0
        now = f", and {size} bytes are in it now" if size else ""
        yield Hit(
            log.span,
            f"every start empties {log.word.value}{now}",
            edits=_append(log),
            instead=_numbered(log),
        )


def _numbered(log: Log) -> str:
    return "a name with the job's number in it, %j" if log.writer == "sbatch" else ""


def _append(log: Log) -> tuple[Edit, ...]:
    if log.command is not None:
        return (Edit(behind(log.command.words[0].span), " -a"),)
    if log.redirect is None:  # sbatch's
        return ()
    operator = log.redirect.operator
    wanted = {">": ">>", ">|": ">>", "&>": "&>>", ">&": "&>>"}.get(operator, operator)
    start = log.span.start + log.span.text.index(operator)
    return (Edit(Span(log.span.source, start, start + len(operator)), wanted),)


def _noclobber(log: Log) -> bool:
    earlier = log.layer.shell.front(log.layer.pipeline)
    return log.writer == "redirect" and any(
        c.argv[:2] == ["set", "-C"] or c.argv[-1:] == ["noclobber"] for c in earlier
    )


def _relative(launch: Launch) -> Iterator[Hit]:
    for log in all_logs(launch):
        kind = log.layer.shell.process.kind
        if log.word is None or kind == "command line":
            continue
        said, path = said_path(log.word, log.layer), path_in(log.word, log.layer)
        if not is_relative(said):
            continue
        directory = working_directory(log.layer, log.layer.place)
        absolute = str(path) if directory and directory.is_dir() else ""
        safe = re.fullmatch(r"[\w./-]+", absolute) and kind != "file"
        yield Hit(
            log.word.span,
            f"{said} lands in {_where(log.layer)}",
            edits=(Edit(log.word.span, absolute),) if safe else (),
        )


def _where(layer: Layer) -> str:
    if hops := layer.place.other_roots:
        return f"the directory in which {' > '.join(hops)} starts a shell"
    return "whatever directory the launch is typed in"


RULES = (
    Rule(
        "DL002",
        "the log cannot be written",
        Severity.RUN,
        "The redirect fails, so the trainer never starts; with tee it runs, and nothing is kept.",
        "python -u train.py >> /workspace 2>&1",
        "python -u train.py >> /workspace/train.log 2>&1",
        "the launch runs as another user, who may write there.",
        _unwritable,
        given="/workspace is a directory; a file you may not write and a read-only disk count, too",
    ),
    Rule(
        "DL003",
        "the log's file system is full",
        Severity.TAIL,
        "The log can be opened, but what is written is lost: with block buffering even without a"
        " message and with status 0.",
        "python -u train.py >> full/train.log 2>&1",
        "python -u train.py >> train.log 2>&1",
        "room is made before the launch.",
        _full,
        given="the file system of `full/` has less than 16 MiB or no inode left",
    ),
    Rule(
        "DL004",
        "the log's name is used again",
        Severity.LOG,
        "`>` and `tee` without -a empty the file before the trainer starts: restarting after a"
        " crash destroys the only record of the crash.",
        "python -u train.py > train.log 2>&1",
        "python -u train.py > train-$(date +%F-%H%M%S).log 2>&1",
        "the earlier log is of no interest, or is moved away in front.",
        _reused,
    ),
    Rule(
        "DL005",
        "the log's path is relative",
        Severity.MISLEADS,
        "It is opened where the shell happens to stand, which tmux, ssh, containers and scripts"
        " decide for you: the log is not where you look for it.",
        "ssh host 'exec python -u train.py >> train.log 2>&1'",
        "ssh host 'exec python -u train.py >> /workspace/train.log 2>&1'",
        "the launch is always typed in the same directory.",
        _relative,
    ),
)
