"""Start a trainer so that its end cannot go unnoticed; `status` tells how it went.

client (this) -> supervisor, in a session of its own or in tmux -> trainer. The client may be killed
as soon as the supervisor runs; the trainer writes into its log by itself and needs neither.
"""

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import diagnostics
from diagnostics.launch import onsite, status, tmux_session
from diagnostics.launch.behind import Unreachable, ask
from diagnostics.launch.journal import append, journal_of, last_run, records
from diagnostics.launch.onsite import Record
from diagnostics.launch.wrappers import basename
from diagnostics.redact import redact, redact_command
from diagnostics.verdict import Status, Verdict

Show = Callable[[str], None]
CHECK_S = 60.0  # for a prefix to lead to the other side
START_S = 20.0  # for a supervisor to write that it runs
SETTLE_S = 1.0  # after a first line: it may be a traceback's
POLL_S = 0.02
CREATES = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
ROOT = Path(diagnostics.__file__).resolve().parent.parent
BESIDE = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from diagnostics.launch.supervisor import beside; sys.exit(beside(sys.argv[2]))"
)
TOLD = ("first_line", "exit", "failed", "lost")


class Refused(Exception):
    """Nothing was started: a stable code, why, and what to type."""

    def __init__(self, code: str, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.verdict = Verdict(Status.PROBLEM, f"launch-{code}", f"not launched: {why}", {}, remedy)


class NotChecked(Refused):
    """Nothing was started, because nobody could look where it is to run."""

    def __init__(self, why: str) -> None:
        super().__init__("not-checked", why)
        remedy = "Behind the prefix there must be a Python 3.8 or newer: COMMAND's, or python3."
        self.verdict = Verdict(
            Status.UNKNOWN, "launch-not-checked", f"not launched: {why}", {}, remedy
        )


@dataclass(frozen=True)
class Wish:
    """What is to be launched. `prefix` leads to where it runs; `patience_s` for its first line."""

    name: str
    command: tuple[str, ...]
    log: str
    tmux: bool = False
    prefix: tuple[str, ...] = ()
    patience_s: float = 120.0

    @property
    def python(self) -> str:
        """A Python behind the prefix: the command's own, or the one that is called so."""
        own = basename(self.command[0]).startswith("python")
        return self.command[0] if own else "python3"


def probe(wish: Wish, *, show: Show) -> Verdict:
    """Launch it, and wait until its first line is there or it can be said why not."""
    try:
        log = _checked(wish)
        run = _claim(wish, log)
        show(f"{wish.name}: launched, its log is {log}; waiting for the first line")
        _start(wish, log, run)
    except Refused as error:
        return error.verdict
    _wait(wish, run)
    return status.probe(wish.name)


def _checked(wish: Wish) -> str:
    """The log's absolute path where the program runs. Raises Refused if anything is in the way."""
    asked: Record = {"command": wish.command, "log": wish.log}
    try:
        found = _check(wish, asked)
    except Unreachable as error:
        raise NotChecked(redact(str(error))) from None
    for code, why in found["wrong"]:
        raise Refused(code, f"{why}{_where(wish)}", _remedy(code, wish, found["log"]))
    return str(found["log"])


def _check(wish: Wish, asked: Record) -> Record:
    if not wish.prefix:
        return onsite.check(asked)
    return ask(wish.prefix, wish.python, "check", asked, within_s=CHECK_S)


def _shown(wish: Wish) -> str:
    return redact_command(wish.prefix)


def _where(wish: Wish) -> str:
    return f" (behind {_shown(wish)})" if wish.prefix else ""


def _remedy(code: str, wish: Wish, log: str) -> str:
    folder = shlex.join([*wish.prefix, "mkdir", "-p", str(Path(log).parent)])
    return {
        "directory-missing": f"Make it, if it is the right one: {folder}",
        "log-exists": "Let every launch have its own: --log '{name}-{time}.log'",
        "program-missing": "Give its whole path, or activate the environment in front.",
        "script-missing": f"It runs in {Path.cwd()}: give its whole path, or go there first."
        if not wish.prefix
        else "Give its whole path there.",
    }.get(code, "Choose another --log.")


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """The journal of a name, which no other client reads or begins meanwhile. Raises Refused."""
    path = journal_of(name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "ab", opener=lambda *_: os.open(path, CREATES, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield path
    except OSError as error:
        why = f"its journal {path} cannot be written: {error.strerror}"
        raise Refused("no-journal", why, "Set XDG_STATE_HOME to a directory of yours.") from None


def _claim(wish: Wish, log: str) -> str:
    """Take the name: the id of the run. Raises Refused if it is live, or tmux would not do."""
    run = uuid.uuid4().hex[:12]
    with _locked(wish.name) as journal:
        if last_run(journal):
            _must_be_over(wish.name)
        if wish.tmux:
            earlier = {str(record["run"]) for record in records(journal)}
            if why := tmux_session.why_not(wish.name, earlier):
                remedy = "Take another --name, or --setsid instead of --tmux."
                raise Refused("tmux", why, remedy)
        client = {
            "command": redact_command(wish.command),
            "log": log,
            "manner": "in tmux" if wish.tmux else "in a session of its own",
            "prefix": wish.prefix,
            "python": wish.python,
            **(onsite.identity(os.getpid()) or {}),
        }
        append(journal, {"run": run, "stage": "client", "time_s": time.time(), **client})
    return run


def _must_be_over(name: str) -> None:
    earlier = status.probe(name)
    live = {"launch-running", "launch-silent", "launch-unwatched", "launch-starting"}
    remedy = f"Take another --name, or look at it: dflash-diag launch status {name}"
    if earlier.code in live:
        raise Refused("name-live", earlier.summary, remedy)
    if "whether it still runs" in earlier.evidence.get("cannot be known", ""):
        raise Refused("name-live", f"{name} may still run: {earlier.summary}", remedy)


def _start(wish: Wish, log: str, run: str) -> None:
    """Start the supervisor. Raises Refused if it does not report in time."""
    journal = journal_of(wish.name)
    spec = journal.with_name(f"{run}.json")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(spec, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(_spec(wish, log, run), file)
    words = [sys.executable, "-I", "-P", "-c", BESIDE, str(ROOT), str(spec)]
    errors = journal.with_name("supervisor.err")
    why, child = "", None
    try:
        if wish.tmux:
            why = tmux_session.start(wish.name, words, str(Path.cwd()), run) or ""
        else:
            child = _in_own_session(words, errors)
        _must_run(wish, run, why or _silence(wish, child, errors))
    finally:
        spec.unlink(missing_ok=True)


def _spec(wish: Wish, log: str, run: str) -> Record:
    return {
        "run": run,
        "name": wish.name,
        "journal": str(journal_of(wish.name)),
        "command": wish.command,
        "log": log,
        "cwd": str(Path.cwd()),
        "env": dict(os.environ),
        "prefix": wish.prefix,
        "python": wish.python,
    }


def _in_own_session(words: list[str], errors: Path) -> subprocess.Popen[bytes]:
    with open(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _silence(wish: Wish, child: subprocess.Popen[bytes] | None, errors: Path) -> str:
    """Wait until the supervisor has written that it runs; else why it will not, and its words."""
    deadline_s = time.monotonic() + START_S
    how = ""
    while not how:
        ended = child.poll() if child else None  # before the look: it may write, and end
        if "supervisor" in last_run(journal_of(wish.name)):
            return ""
        if ended is not None:
            how = f"it ended with status {ended}"
        elif time.monotonic() > deadline_s:
            how = f"it was not heard of for {START_S:g} s"
        time.sleep(POLL_S)
    shown = errors.read_text() if child else tmux_session.screen(wish.name)
    said = (shown.strip().splitlines() or ["nothing"])[-1]
    return f"{how}, and said: {redact(said)}"


def _must_run(wish: Wish, run: str, why: str) -> None:
    """Write down that there is no supervisor, if so. Raises Refused."""
    if not why:
        return
    with _locked(wish.name) as journal:
        if "supervisor" in last_run(journal):
            return
        failed = {"run": run, "stage": "failed", "step": "supervisor", "why": why}
        append(journal, {**failed, "time_s": time.time()})
    raise Refused("no-supervisor", f"its supervisor did not start: {why}")


def _wait(wish: Wish, run: str) -> None:
    """Until there is something to tell, and a moment longer for what begins with its end."""
    deadline_s = time.monotonic() + wish.patience_s
    while time.monotonic() < deadline_s:
        found = last_run(journal_of(wish.name))
        if "exit" in found or "failed" in found or "lost" in found:
            return
        if not onsite.is_alive(found["supervisor"]):
            return
        if "first_line" in found:
            deadline_s = min(deadline_s, time.monotonic() + SETTLE_S)
        time.sleep(POLL_S)
