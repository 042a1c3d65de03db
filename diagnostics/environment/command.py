"""`dflash-diag env`: which code would run here, and how this environment differs from another."""

import json as jsonlib
import os
from pathlib import Path
from typing import Any

import click

from diagnostics.deploy import places
from diagnostics.environment import collect, difference
from diagnostics.probes import env as probe
from diagnostics.redact import redact_mapping
from diagnostics.render.answer import finish
from diagnostics.verdict import EXIT_CODES, Status, Verdict

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("env", epilog=EXIT_CODES)
@click.option("--save", type=FILE, metavar="FILE", help="write this environment's fingerprint")
@click.option("--diff", type=FILE, metavar="FILE", help="compare with one that was saved")
@click.option("--exec-in", metavar="PREFIX", help="the environment behind: 'ssh host', ...")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def env(save: Path | None, diff: Path | None, exec_in: str | None, as_json: bool) -> None:
    """Show which code would run: interpreter, import paths, versions, code hash, git state.

    Finds import names that two distributions claim, and a `dflash` that is not the one this
    command belongs to. With --save, --diff or --exec-in: a fingerprint of torch and its settings,
    packages, GPUs and driver, variables (secrets hidden), Python, system and limits, compared with
    another one's; --exec-in alone compares here with there.
    """
    if not (save or diff or exec_in):
        finish(probe.probe(), as_json)
    try:
        mine = fingerprint(exec_in)
        name = f"behind {exec_in!r}" if exec_in else "here"
        if save:
            _write(save, mine)
            click.echo(f"{name}: {save}", err=as_json)
            if not diff:
                return
        other, other_name = (_read(diff), str(diff)) if diff else (fingerprint(None), "here")
        verdict = difference.judge(other, mine, (other_name, name))
    except places.Unreachable as error:
        verdict = Verdict(Status.UNKNOWN, "unreachable", str(error), remedy=error.remedy)
    finish(verdict, as_json)


def fingerprint(exec_in: str | None) -> dict[str, Any]:
    """The environment here, or behind a prefix, redacted. Raises Unreachable."""
    source = Path(collect.__file__).read_text(encoding="utf-8")
    found = places.answer_behind(exec_in, source) if exec_in else collect.collect()
    return {**found, "variables": redact_mapping(found["variables"])}


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            jsonlib.dump(found, file, indent=1)
    except FileExistsError:
        raise click.UsageError(f"--save {path}: exists; name another file, or remove it") from None
    except OSError as error:
        raise click.UsageError(f"--save {path}: {error.strerror}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = jsonlib.loads(path.read_text(encoding="utf-8"))
        found["torch"], found["variables"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.UsageError(
            f"--diff {path}: is no saved environment; write one with --save"
        ) from error
    return found
