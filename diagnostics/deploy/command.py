"""`dflash-diag deploy-check`: is the code that will run, or runs, the code that is meant?"""

import json as jsonlib
import re
import time
from pathlib import Path
from typing import Any

import click

from diagnostics.deploy import places
from diagnostics.deploy.compare import judge, when
from diagnostics.deploy.places import Unreachable
from diagnostics.deploy.process import running
from diagnostics.processes import duration
from diagnostics.render.answer import finish
from diagnostics.verdict import EXIT_CODES, Status, Verdict

FIRST_LINE = re.compile(r"\bdflash [^|]+ \| git [^|]+ \| code ([0-9a-f]{12}) \|")
FILE = click.Path(path_type=Path, dir_okay=False)
EXISTING = click.Path(path_type=Path, exists=True, dir_okay=False)
GREATEST_PID = 2**22
NAME = "MODULE:NAME"
SHOWN = 3  # of the files that changed


@click.group("deploy-check", epilog=EXIT_CODES)
def deploy_check() -> None:
    """Find out whether the code in another place, or in a process, is the code that is meant.

    Write a manifest where the right code lies; verify it where the program runs.
    """


@deploy_check.command("write", epilog=EXIT_CODES)
@click.argument("what", metavar="DIR|PACKAGE")
@click.argument("file", type=FILE, metavar="MANIFEST")
def write(what: str, file: Path) -> None:
    """Write down the hashes of all files of a directory or of an installed package.

    Links are followed where they lead to Python sources: that is what runs.
    """
    from dflash.manifest import git_state, package_hash

    try:
        found = places.here(what)
    except Unreachable as error:
        raise click.UsageError(str(error)) from error
    git = git_state(Path(found["directory"]))
    found["code"] = package_hash(Path(found["directory"]))
    try:
        with file.open("x", encoding="utf-8") as stream:
            jsonlib.dump({**found, "git": git}, stream, indent=1)
    except FileExistsError:
        raise click.UsageError(f"{file} exists; name another file, or remove it") from None
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}") from error
    click.echo(f"{len(found['files'])} files of {found['directory']}, git {git}: {file}")
    if git.endswith("-dirty"):
        click.echo("note: the directory has changes that are in no commit")


def _regular(_context: click.Context, _param: click.Parameter, path: Path) -> Path:
    if not path.is_file():  # of a pipe nobody knows when it ends
        raise click.BadParameter(f"{path}: must be a regular file; type: cat {path} > FILE")
    return path


def _names(
    _context: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    for value in values:
        module, _, name = value.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise click.BadParameter(f"{value}: must be {NAME}, such as trainer.compile:Lock.take")
    return values


def _package(_context: click.Context, _param: click.Parameter, value: str) -> str:
    if not all(part.isidentifier() for part in value.split(".")):
        raise click.BadParameter(f"{value}: must be a name as in `import trainer`; such as trainer")
    return value


def _names_option(name: str, text: str) -> Any:
    return click.option(name, multiple=True, metavar=NAME, callback=_names, help=text)


def _asked(command: Any) -> Any:
    """The options of both ways to verify."""
    options = (
        _names_option("--expect", "must be defined there"),
        _names_option("--forbid", "must not be defined there"),
        click.option("--json", "as_json", is_flag=True, help="print one JSON object"),
    )
    for option in options:
        command = option(command)
    return command


@deploy_check.command("verify", epilog=EXIT_CODES)
@click.argument("manifest", type=EXISTING, callback=_regular)
@click.argument("what", metavar="DIR|PACKAGE")
@click.option("--root", type=click.Path(path_type=Path, exists=True, file_okay=False), help="below")
@click.option("--exec-in", metavar="PREFIX", help="behind: 'ssh host', 'pct exec 200 --', ...")
@_asked
def verify(
    manifest: Path,
    what: str,
    root: Path | None,
    exec_in: str | None,
    expect: tuple[str, ...],
    forbid: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare a directory or package, here or in another place, with a manifest.

    --root takes the root of another file system: a chroot, or /proc/PID/root of a process in a
    container. --exec-in takes the command that leads to the place, where nothing but python3 is
    needed: this program's own source is sent there through standard input.
    """
    if root and exec_in:
        raise click.UsageError("give --root or --exec-in, not both")
    names = [*expect, *forbid]
    where = f"behind {exec_in!r}" if exec_in else f"below {root}" if root else "here"
    try:
        place = _look(what, names, root, exec_in)
        verdict = judge(_read(manifest), place, where, expect=expect, forbid=forbid)
    except Unreachable as error:
        verdict = Verdict(Status.UNKNOWN, "unreachable", str(error), remedy=error.remedy)
    finish(verdict, as_json)


def _look(what: str, names: list[str], root: Path | None, exec_in: str | None) -> dict[str, Any]:
    if exec_in:
        return places.behind(exec_in, what, names)
    return places.here(what, names, root)


@deploy_check.command("process", epilog=EXIT_CODES)
@click.argument("manifest", type=EXISTING, callback=_regular)
@click.argument("pid", type=click.IntRange(1, GREATEST_PID))
@click.option(
    "--package",
    default="dflash",
    show_default=True,
    callback=_package,
    help="the name it is imported by",
)
@_asked
def process(
    pid: int,
    manifest: Path,
    package: str,
    expect: tuple[str, ...],
    forbid: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare the files that a running process takes a package from with a manifest.

    Looks through the process's own root, so that a container's files are the container's. Finds
    files that changed after the process started, and a second copy on its path: unknown if that
    one differs, and the process did not say which one it took.
    """
    try:
        found = running(pid, package)
        place = found.fingerprint([*expect, *forbid])
        where = f"in process {pid}, started {duration(time.time() - found.started_s)} ago"
        verdict = judge(_read(manifest), place, where, expect=expect, forbid=forbid)
        verdict = _with_process(verdict, found, place)
    except Unreachable as error:
        verdict = Verdict(Status.UNKNOWN, "unreachable", str(error), remedy=error.remedy)
    finish(verdict, as_json)


@deploy_check.command("log", epilog=EXIT_CODES)
@click.argument("manifest", type=EXISTING, callback=_regular)
@click.argument("log", type=EXISTING, callback=_regular)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def log_line(log: Path, manifest: Path, as_json: bool) -> None:
    """Compare the code that a run of `dflash train` named in its first log line with a manifest.

    The last such line counts, where a log holds several runs.
    """
    code = _read(manifest)["code"]
    said = FIRST_LINE.findall(log.read_text(encoding="utf-8", errors="replace"))
    if not said:
        verdict = Verdict(Status.UNKNOWN, "no-first-line", f"{log} has no first line of a run")
    elif code.startswith(said[-1]):
        verdict = Verdict(Status.OK, "same-code", f"the run ran code {said[-1]}, the manifest's")
    else:
        summary = f"the run ran code {said[-1]}, the manifest has {code[:12]}"
        verdict = Verdict(Status.PROBLEM, "other-code", summary)
    finish(verdict, as_json)


def _with_process(verdict: Verdict, found: Any, place: dict[str, Any]) -> Verdict:
    """Add how its directory is known, and what makes the files no proof of what it runs."""
    changed = found.changed_since_start(place["files"])
    rivals = found.rivals(place["files"]) if verdict.status is Status.OK else []
    from dflash.manifest import git_state

    evidence = {
        **verdict.evidence,
        "git there": git_state(Path(place["directory"])),
        **place["bytecode"],
        "directory": f"{found.directory}: {found.source}",
        **({"changed later": _changed(changed)} if changed else {}),
        **({"other copies": ", ".join(found.others)} if found.others else {}),
    }
    summary, status, code, remedy = verdict.summary, verdict.status, verdict.code, verdict.remedy
    if changed and status is Status.OK:
        status, code = Status.UNKNOWN, "changed-since-start"
        summary += f"; but {len(changed)} changed after it started, so that it may run older ones"
    if others := len(found.others):
        summary += f"; {others} other cop{'y' if others == 1 else 'ies'} on its path"
    if rivals and status is Status.OK:
        status, code = Status.UNKNOWN, "which-copy"
        summary += f"; it may have taken {rivals[0]}, whose files differ"
        remedy = "Take the other copies off its path, or let it print where it imports from."
    return Verdict(status, code, summary, evidence, remedy)


def _changed(changed: list[tuple[float, str]]) -> str:
    """How many files, and the newest of them."""
    newest = [f"{path} {when(time_s)}" for time_s, path in changed[: -SHOWN - 1 : -1]]
    more = ", ..." if len(changed) > SHOWN else ""
    return f"{len(changed)} file(s), after the process started: {', '.join(newest)}{more}"


def _read(manifest: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = jsonlib.loads(manifest.read_text(encoding="utf-8"))
        wrong = places.flaw(read, code=places.TEXT)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise click.UsageError(
            f"{manifest} is no manifest: {wrong}; "
            "write one with `dflash-diag deploy-check write DIR|PACKAGE FILE`"
        )
    return read
