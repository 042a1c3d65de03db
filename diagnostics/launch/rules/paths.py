"""The path of the log: whether it can be opened, and what was in it before."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Launch, Layer
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before, behind
from diagnostics.launch.shell import Span, Word
from diagnostics.launch.streams import Log, logs
from diagnostics.launch.whereabouts import path_in, said_directory, value_of, working_directory

FULL_BYTES = 16 << 20
FULL_INODES = 16


def all_logs(launch: Launch) -> Iterator[Log]:
    """The logs of all programs that train, each once."""
    seen = set[Span]()
    for log in (log for chain in launch.trainers for log in logs(chain)):
        if log.span not in seen:
            seen.add(log.span)
            yield log


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
    directory = directory_word(word)
    if not directory.value:
        return working_directory(layer, layer.place)
    return path_in(directory, layer)


def _made(word: Word, layer: Layer) -> bool:
    """Whether a `mkdir` in front, here or in a shell around, makes the directory."""
    wanted = directory_word(word)
    known = layer.values()
    target = value_of(wanted, known) or wanted.value
    for each in (*layer.shell.opened_by, layer):
        for pipeline in each.shell.script.before(each.pipeline) if each.own else ():
            command = pipeline.commands[0]
            if command.argv[:1] == ["mkdir"]:
                then = each.shell.values(pipeline)
                made = [value_of(w, then) or w.value for w in command.words[1:]]
                if any(Path(target) in (Path(m), *Path(m).parents) for m in made):
                    return True
    return False


def _missing(launch: Launch, writer: str) -> Iterator[Hit]:
    for log in all_logs(launch):
        if log.word is None or (log.writer == "tee") != (writer == "tee"):
            continue
        directory = directory_of(log.word, log.layer)
        if _made(log.word, log.layer):
            continue
        if directory is None:
            yield _cannot_check(log.word, log.layer)
        elif not directory.is_dir():
            pipeline = log.layer.pipeline
            then = "; " if pipeline.background else " && "  # `a && b & echo $!` is another process
            make = f"mkdir -p {directory_word(log.word).span.text}{then}"
            yield Hit(
                directory_word(log.word).span,
                f"there is no directory {directory}",
                edits=(Edit(before(pipeline.span), make),),
            )


def _cannot_check(word: Word, layer: Layer) -> Hit:
    unwritten = value_of(directory_word(word), layer.values()) is None
    shown = directory_word(word).value or said_directory(layer) or "the directory it starts in"
    if unwritten and layer.place.here:
        what = f"the value of {shown} is not written in the launch"
        return Hit(word.span, what, instead=f"put in front: mkdir -p {shown}", unknown=True)
    what = f"{shown} on {layer.place} cannot be looked at from here"
    test = f"test -w {shown} && df -h {shown}" if " " not in shown else "pwd; df -h ."
    return Hit(word.span, what, instead=f"type there: {test}", unknown=True)


def _missing_for_redirect(launch: Launch) -> Iterator[Hit]:
    return _missing(launch, "redirect")


def _missing_for_tee(launch: Launch) -> Iterator[Hit]:
    return _missing(launch, "tee")


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
        yield Hit(log.span, f"every start empties {log.word.value}{now}", edits=_append(log))


def _append(log: Log) -> tuple[Edit, ...]:
    if log.command is not None:
        return (Edit(behind(log.command.words[0].span), " -a"),)
    assert log.redirect is not None
    operator = log.redirect.operator
    wanted = {">": ">>", ">|": ">>", "&>": "&>>", ">&": "&>>"}.get(operator, operator)
    start = log.span.start + log.span.text.index(operator)
    return (Edit(Span(log.span.source, start, start + len(operator)), wanted),)


def _noclobber(log: Log) -> bool:
    earlier = log.layer.shell.script.before(log.layer.pipeline)
    return log.writer == "redirect" and any(
        p.commands[0].argv[:2] == ["set", "-C"] or p.commands[0].argv[-1:] == ["noclobber"]
        for p in earlier
    )


def _relative(launch: Launch) -> Iterator[Hit]:
    for log in all_logs(launch):
        if log.word is None or log.layer.shell.kind == "command line":
            continue
        value = value_of(log.word, log.layer.values()) or log.word.value
        if value.startswith(("/", "~", "$")) or said_directory(log.layer):
            continue
        directory = working_directory(log.layer, log.layer.place)
        absolute = f"{directory}/{value}" if directory else ""
        safe = re.fullmatch(r"[\w./-]+", absolute) and log.layer.shell.kind != "file"
        yield Hit(
            log.word.span,
            f"{value} lands in {_where(log.layer)}",
            edits=(Edit(log.word.span, absolute),) if safe else (),
        )


def _where(layer: Layer) -> str:
    if hops := layer.place.other_roots:
        return f"the directory in which {' > '.join(hops)} starts a shell"
    return "whatever directory the launch is typed in"


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
