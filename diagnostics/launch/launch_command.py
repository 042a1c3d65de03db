"""The options of `dflash-diag launch` and `dflash-diag launch status`."""

import dataclasses
import json as jsonlib
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import click

from diagnostics.launch import last_lines
from diagnostics.render import json, junit
from diagnostics.verdict import EXIT_CODES, ProbeExit, Verdict, worst

FILE = click.Path(path_type=Path, dir_okay=False)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # tmux changes `.` and `:` in a name


class _StartsByDefault(click.Group):
    """`launch --name …` is `launch start --name …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_StartsByDefault,
    epilog=EXIT_CODES,
    options_metavar="",
    subcommand_metavar="[start] OPTIONS -- COMMAND... | status [NAME]",
)
def launch() -> None:
    """Start a training run so that its end cannot go unnoticed, and ask how it goes.

    \b
    dflash-diag launch --name train --log runs/{name}-{time}.log -- python train.py
    dflash-diag launch status train
    """


def _name(_context: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not NAME.fullmatch(value):
        raise click.BadParameter("letters, digits, - and _, at most 64, such as train-7")
    return value


def _prefix(_context: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(f"{value}: {error}") from None


@launch.command("start", epilog=EXIT_CODES)
@click.option("--name", required=True, callback=_name, help="to ask for it by, and tmux's session")
@click.option(
    "--log",
    required=True,
    metavar="PATH",
    help="where the program runs; {name} and {time} are filled in",
)
@click.option("--tmux/--setsid", default=False, help="in a tmux session, or (default) without one")
@click.option(
    "--exec-in",
    "prefix",
    default="",
    metavar="PREFIX",
    callback=_prefix,
    help='what leads to where it runs: "pct exec 200 --", "ssh host"',
)
@click.option(
    "--first-line-s",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    help="return after so many seconds without output; the program runs on",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "--junit", "junit_path", type=FILE, metavar="FILE", help="write a JUnit report as well"
)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
def start(
    name: str,
    log: str,
    tmux: bool,
    prefix: tuple[str, ...],
    first_line_s: float,
    as_json: bool,
    junit_path: Path | None,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND; return with its first line, or say why there is none.

    Nothing is overwritten: neither a log nor a name that is live. The output goes unbuffered
    (PYTHONUNBUFFERED=1) and straight into the log; the program survives a lost connection and the
    death of everything around it. Each stage is written down, and so are its exit status or the
    signal that killed it: dflash-diag launch status NAME. Signals to
    the supervisor reach COMMAND itself; a script keeps them to itself unless it ends in exec.
    """
    from diagnostics.launch import launcher

    wish = launcher.Wish(name, command, _filled_in(log, name), tmux, prefix, first_line_s)
    try:
        verdict = launcher.probe(wish, show=lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        click.echo(f"\nNot waited for; how it goes: dflash-diag launch status {name}", err=True)
        sys.exit(130)
    _show(verdict, "launch", as_json, junit_path)


def _filled_in(log: str, name: str) -> str:
    known = {"name": name, "time": time.strftime("%Y%m%d-%H%M%S")}
    for field in re.findall(r"\{(.*?)\}", log):
        if field not in known:
            raise click.UsageError(f"--log {log}: {{{field}}} is neither {{name}} nor {{time}}")
    return re.sub(r"\{(.*?)\}", lambda found: known[found[1]], log)


@launch.command("status", epilog=EXIT_CODES)
@click.argument("name", required=False, callback=_name)
@click.option(
    "--lines",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="how many of the log's last to show",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "--junit", "junit_path", type=FILE, metavar="FILE", help="write a JUnit report as well"
)
def status(name: str | None, lines: int, as_json: bool, junit_path: Path | None) -> None:
    """Say how it goes: running, exited N, killed by SIG..., or vanished.

    Without NAME: one line for each name, with --json an object with each name's own; the worst of
    them is the exit code. Works from any terminal of the same user, also after the launching one,
    the supervisor, tmux or the machine was restarted.
    """
    from diagnostics.launch import journal
    from diagnostics.launch import status as reading

    if name is None and junit_path:
        raise click.UsageError("--junit is about one launch: give its NAME")
    if name is None:
        _show_all({each: reading.probe(each, lines) for each in journal.names()}, as_json)
    try:
        verdict = reading.probe(name, lines)
    except KeyError:
        known = ", ".join(journal.names()) or "none"
        raise click.UsageError(f"nothing was launched as {name}; launched: {known}") from None
    except PermissionError as error:
        raise click.UsageError(f"{error.filename} may not be read: whose launch is it?") from None
    _show(verdict, "launch status", as_json, junit_path)


def _show_all(verdicts: Mapping[str, Verdict], as_json: bool) -> NoReturn:
    """Print them; exit with the worst one's code."""
    if as_json:
        fields = {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()}
        click.echo(jsonlib.dumps(fields, indent=2))
    else:
        for verdict in verdicts.values():
            click.echo(verdict.summary)
    sys.exit(ProbeExit[worst(verdict.status for verdict in verdicts.values()).name])


def _show(verdict: Verdict, probe: str, as_json: bool, path: Path | None) -> NoReturn:
    """Print it, the log's last lines below; exit."""
    if path is not None:
        junit.write(path, junit.render(verdict, probe))
    click.echo(json.render(verdict) if as_json else last_lines.render(verdict))
    sys.exit(verdict.exit_code)
