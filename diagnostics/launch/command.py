"""The options of `dflash-diag launch-check` and `explain`, and which part answers them."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diagnostics.launch import last_lines
from diagnostics.render import json, junit, text
from diagnostics.verdict import EXIT_CODES, Verdict

if TYPE_CHECKING:
    from diagnostics.launch.shell import Source

FILE = click.Path(path_type=Path, dir_okay=False)
PATH = click.Path(path_type=Path)
LARGEST_BYTES = 1 << 20
Answer = tuple[Verdict, list[junit.Case]]


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; names as there."""

    command: tuple[str, ...]
    canary: bool
    full: bool
    resume: bool
    post_mortem: bool
    log: Path | None
    session: str | None
    since: float | None
    recover: Path | None
    as_json: bool
    junit: Path | None

    def show(self, line: str) -> None:
        """Progress: on standard output, or beside it where that is JSON."""
        click.echo(line, err=self.as_json)


def _since(_context: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    from diagnostics.launch.post_mortem import point_in_time

    try:
        return None if value is None else point_in_time(value)
    except ValueError:
        raise click.BadParameter(
            f"{value}: say 00:10, '2026-11-30 00:10' or '30 min ago'"
        ) from None


@click.command("launch-check", epilog=EXIT_CODES)
@click.argument("command", nargs=-1, metavar="[-- COMMAND...]")
@click.option("--canary", is_flag=True, help="run COMMAND with a canary in the trainer's place")
@click.option("--full", is_flag=True, help="without COMMAND: every launch and every death")
@click.option("--resume", is_flag=True, help="with --full: go on where it was interrupted")
@click.option("--post-mortem", is_flag=True, help="after a silent failure: why is there no --log?")
@click.option(
    "--log", type=PATH, metavar="PATH", help="with --post-mortem: the log that is missing"
)
@click.option("--session", metavar="NAME", help="with --post-mortem: the launch's tmux session")
@click.option(
    "--since",
    metavar="TIME",
    callback=_since,
    help="with --post-mortem: when it was launched: '2026-11-30 00:10', 00:10, '30 min ago'",
)
@click.option("--recover", type=FILE, metavar="FILE", help="with --post-mortem: copy the log there")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--junit", type=FILE, metavar="FILE", help="write a JUnit report as well")
def launch_check(**options: Any) -> None:
    """Will this launch say that it died, of what, and with which last lines?

    Reads COMMAND and says what can be lost, where in it, and what to write instead; nothing is
    started. COMMAND is a script, the words of a command behind `--`, or, to keep redirects and
    quotes as you type them, one word: -- 'nohup bash run.sh > train.log 2>&1 &'. A single `-`
    reads it from standard input.

    Without COMMAND it launches a small program in many ways on this machine, lets it die in many
    ways, and shows what survived.

    With --post-mortem it looks for what a launch that left no log has left instead.
    """
    request = Request(**options)
    answer = _chosen(request)
    verdict, cases = answer(request)
    if request.junit is not None:
        junit.write(request.junit, junit.render(verdict, "launch-check", cases))
    click.echo(json.render(verdict) if request.as_json else _rendered(verdict, answer))
    sys.exit(verdict.exit_code)


def _rendered(verdict: Verdict, answer: Callable[[Request], Answer]) -> str:
    """What ran has shown its evidence as it came."""
    if answer is _post_mortem:
        return last_lines.render(verdict)
    ran = answer is not _read
    return "\n" * ran + text.render(verdict, evidence=not ran)


def _chosen(request: Request) -> Callable[[Request], Answer]:
    """Raises click.UsageError if the options contradict each other."""
    _check_post_mortem(request)
    if request.canary and not request.command:
        raise click.UsageError("--canary needs a launch: dflash-diag launch-check --canary run.sh")
    if request.command and (request.full or request.resume):
        raise click.UsageError("--full and --resume are for the table, without COMMAND")
    if request.resume and not request.full:
        raise click.UsageError("--resume goes with --full")
    if request.junit is not None and not request.junit.parent.is_dir():
        raise click.UsageError(f"--junit {request.junit}: make its directory first")
    if request.post_mortem:
        return _post_mortem
    if request.canary:
        return _canary
    return _read if request.command else _table


def _check_post_mortem(request: Request) -> None:
    """Raises click.UsageError if its options contradict each other, or the others."""
    its_own = (request.log, request.session, request.since, request.recover)
    if not request.post_mortem:
        if any(option is not None for option in its_own):
            raise click.UsageError("--log, --session, --since, --recover go with --post-mortem")
        return
    if request.command or request.canary or request.full:
        raise click.UsageError("--post-mortem looks at what was launched: leave COMMAND out")
    if request.log is None:
        raise click.UsageError("--post-mortem needs the log that is missing: --log PATH")
    if request.recover is not None and os.path.lexists(request.recover):
        raise click.UsageError(f"--recover {request.recover} exists: name a new file")


def _post_mortem(request: Request) -> Answer:
    from diagnostics.launch import post_mortem

    assert request.log is not None
    return post_mortem.probe(
        log=request.log, session=request.session, since=request.since, recover=request.recover
    )


def _table(request: Request) -> Answer:
    from diagnostics.launch import matrix

    return matrix.probe(full=request.full, resume=request.resume, show=request.show)


def _canary(request: Request) -> Answer:
    from diagnostics.launch import canary

    return canary.probe(source_of(request.command), show=request.show)


def _read(request: Request) -> Answer:
    from diagnostics.launch import report
    from diagnostics.launch.check import check

    found = check(source_of(request.command))
    if not request.as_json and (said := report.render(found)):
        request.show(f"{said}\n")
    return report.verdict(found), report.cases(found)


def source_of(command: tuple[str, ...]) -> "Source":
    """What is to be read: a script, standard input, or a command line.

    Words come through the user's shell already, without their quotes: they are quoted again. Raises
    click.UsageError for a script that cannot be read.
    """
    from diagnostics.launch.shell import Source

    if command == ("-",):
        return Source("standard input", _text("standard input", sys.stdin.buffer.read()))
    if len(command) > 1:
        return Source("command line", shlex.join(command))
    (word,) = command
    path = Path(word)
    if path.is_file() and path.suffix != ".py":
        return Source(word, _script(path), path.resolve(), str(path.resolve().parent))
    if re.fullmatch(r"\S+/\S*|\S+\.(ba)?sh", word) and not path.exists():
        raise click.UsageError(f"{word}: there is no such file; name a script or a command")
    return Source("command line", word)


def _script(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise click.UsageError(f"{path}: too large for a script ({path.stat().st_size} bytes)")
        return _text(str(path), path.read_bytes())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None


def _text(name: str, raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise click.UsageError(f"{name} is not text; name the script that starts it")
    return text


@click.command("explain", epilog="Exit codes: 0 shown, 2 no such code.")
@click.argument("code")
def explain(code: str) -> None:
    """Print the page of a finding, such as DL004: why, wrong, right, and when to ignore it."""
    from diagnostics.launch import pages
    from diagnostics.launch.rules import RULES

    rule = RULES.get(code.upper())
    if rule is None:
        raise click.UsageError(f"{code}: choose from {', '.join(RULES)}")
    click.echo(pages.explain(rule))
