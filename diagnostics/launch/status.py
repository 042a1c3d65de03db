"""How a launch goes, or how it ended: its journal beside what can be seen now.

A process id says nothing by itself: the trainer is the process with its start time, in its boot. A
launch whose end nobody wrote down is `vanished`, and never taken for one that ended well.
"""

import time
from dataclasses import dataclass
from datetime import timedelta

from diagnostics.launch import onsite, tmux_session
from diagnostics.launch.behind import Unreachable, ask
from diagnostics.launch.journal import journal_of, last_run
from diagnostics.launch.last_lines import LAST_LINES
from diagnostics.launch.onsite import Record
from diagnostics.redact import redact, redact_command
from diagnostics.verdict import Status, Verdict

Run = dict[str, Record]
LOOK_S = 30.0  # for a prefix to lead to the other side
RECORD_S = 5.0  # for a supervisor to write down what it saw
POLL_S = 0.02


@dataclass(frozen=True)
class Seen:
    """A launch: its records, and what `onsite.look` sees now (`blind`: why it sees nothing)."""

    name: str
    run: Run
    now: Record
    blind: str = ""

    @property
    def watched(self) -> bool:
        """Whether somebody waits for the trainer's end."""
        return onsite.is_alive(self.run.get("supervisor"))

    @property
    def restarted(self) -> bool:
        """Whether this machine was, since the launch."""
        return bool(self.run["client"]["boot_id"] != onsite.boot_id())


def probe(name: str, lines: int = 10) -> Verdict:
    """How the launch of this name goes. Raises KeyError if there was none."""
    seen = see(name, lines)
    verdict = _judge(seen)
    evidence = {**_record(seen), **verdict.evidence}
    if tail := seen.now.get("tail"):
        evidence[LAST_LINES] = "\n".join(redact(line) for line in tail)
    return Verdict(verdict.status, verdict.code, verdict.summary, evidence, verdict.remedy)


def see(name: str, lines: int = 10) -> Seen:
    """Read its journal and look. Raises KeyError if nothing was launched under this name."""
    deadline_s = time.monotonic() + RECORD_S
    while True:
        run = last_run(journal_of(name))
        if not run:
            raise KeyError(name)
        now, blind = _look(run, lines)
        seen = Seen(name, run, now, blind)
        waits = "exec" in run and "exit" not in run and now.get("alive") is False and seen.watched
        if not waits or time.monotonic() > deadline_s:
            return seen
        time.sleep(POLL_S)  # it has just ended, and that is being written down


def _look(run: Run, lines: int) -> tuple[Record, str]:
    client, trainer, ended = run["client"], run.get("exec"), run.get("exit", {})
    path = run.get("redirect", {}).get("path", client["log"])
    asked = {"process": trainer, "log": path, "left": ended.get("left", []), "lines": lines}
    if not client["prefix"]:
        return onsite.look(asked), ""
    try:
        now = ask(client["prefix"], client["python"], "look", asked, within_s=LOOK_S)
    except Unreachable as error:
        return {}, redact(str(error))
    return _comparable(now, trainer), ""


def _comparable(now: Record, trainer: Record | None) -> Record:
    """A prefix that makes a new namespace of process ids each time cannot see the trainer."""
    elsewhere = trainer is not None and now["pid_namespace"] != trainer["pid_namespace"]
    return {**now, "alive": None, "left": []} if elsewhere else now


def _judge(seen: Seen) -> Verdict:
    run = seen.run
    if "failed" in run:
        return _failed(seen)
    if "exit" in run:
        return _ended(seen)
    if "exec" in run and seen.now.get("alive"):
        return _running(seen)
    if seen.watched and "exec" not in run:
        return _starting(seen)
    if seen.watched and seen.now.get("alive") is not False:
        return _running(seen)  # so says the supervisor; from here it cannot be seen
    if "supervisor" not in run and onsite.is_alive(run["client"]):
        return _starting(seen)
    return _vanished(seen)


def _starting(seen: Seen) -> Verdict:
    return Verdict(Status.UNKNOWN, "launch-starting", f"{seen.name} is being started")


def _failed(seen: Seen) -> Verdict:
    step, why = seen.run["failed"]["step"], seen.run["failed"]["why"]
    what = {
        "redirect": "its log could not be opened",
        "exec": "its program could not be started",
        "prefix": "its --exec-in could not be run",
        "supervisor": "its supervisor did not start",
    }[step]
    return Verdict(
        Status.PROBLEM, f"launch-no-{step}", f"{seen.name} never started: {what}: {redact(why)}"
    )


def _running(seen: Seen) -> Verdict:
    trainer = seen.run["exec"]
    who = f"{seen.name} is running: process {trainer['pid']}"
    if not seen.watched:
        return Verdict(
            Status.PROBLEM,
            "launch-unwatched",
            f"{who}, but its supervisor is gone: nobody will learn how it ends",
            remedy="Its log goes on; when it has ended, only the last lines will tell.",
        )
    if "first_line" not in seen.run:
        silent = _duration(time.time() - trainer["time_s"])
        summary = f"{who}, silent for {silent}, since its start"
        remedy = f"See what it does: dflash-diag stacks {trainer['pid']}"
        return Verdict(Status.UNKNOWN, "launch-silent", summary, remedy=remedy)
    return Verdict(
        Status.OK, "launch-running", who, remedy=f"Stop it: kill {seen.run['supervisor']['pid']}"
    )


def _ended(seen: Seen) -> Verdict:
    end = seen.run["exit"]
    took = _duration(end["after_s"])
    left = seen.now.get("left", [])
    still = f"; still running of it: {', '.join(str(each['pid']) for each in left)}" if left else ""
    evidence = {}
    if end["out_of_memory"]:
        evidence["memory"] = f"the kernel killed {end['out_of_memory']} process(es) for want of it"
    if "signal" in end:
        summary = f"{seen.name} was killed by {end['signal']} after {took}{still}"
        return Verdict(Status.PROBLEM, "launch-killed", summary, evidence, _help(left))
    summary = f"{seen.name} exited {end['status']} after {took}{still}"
    status = Status.PROBLEM if end["status"] or left else Status.OK
    return Verdict(status, "launch-exited", summary, evidence, _help(left))


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _help(left: list[Record]) -> str:
    return f"End what is left: kill {' '.join(str(each['pid']) for each in left)}" if left else ""


def _vanished(seen: Seen) -> Verdict:
    run = seen.run
    evidence = {"cannot be known": "its exit status, or the signal that ended it"}
    if seen.restarted:
        what = "this machine was restarted since"
    elif "supervisor" not in run:
        what = "its client was killed before anything was started"
        evidence = {}
    elif "lost" in run:
        what = "the way to it was lost"
    elif "exec" not in run:
        what = "its supervisor was killed while it started"
        evidence = {"cannot be known": "whether the trainer was started"}
    else:
        what = "its end was not written down, since its supervisor was killed"
    if how := _pane(run):
        evidence["supervisor"] = f"ended with {how}, says tmux"
    if "lost" in run:
        said = " ".join(run["lost"]["said"][-1:]) or "nothing"
        end = run["lost"].get("signal") or f"status {run['lost']['status']}"
        evidence["--exec-in"] = f"ended with {end}, and said: {redact(said)}"
    if seen.blind or seen.now.get("alive", False) is None:
        evidence["cannot be known"] = "whether it still runs, and how it ends"
        evidence["looked"] = seen.blind or "its process ids are not visible through --exec-in"
    log = run.get("redirect", {}).get("path", run["client"]["log"])
    remedy = f"Look for what is left: dflash-diag launch-check --post-mortem --log {log}"
    return Verdict(
        Status.UNKNOWN, "launch-vanished", f"{seen.name} vanished: {what}", evidence, remedy
    )


def _pane(run: Run) -> str:
    pane = run.get("supervisor", {}).get("tmux_pane")
    return tmux_session.pane_end(pane, run["client"]["run"]) if pane else ""


def _record(seen: Seen) -> dict[str, str]:
    """What is written down, for people."""
    run, client = seen.run, seen.run["client"]
    shown = {
        "command": redact(client["command"]),
        "launched": f"{_clock(client['time_s'])}, {client['manner']}",
    }
    if client["prefix"]:
        shown["through"] = redact_command(client["prefix"])
    if "exec" in run:
        shown["started"] = f"{_clock(run['exec']['time_s'])}, process {run['exec']['pid']}"
    if "first_line" in run:
        shown["first line"] = f"after {run['first_line']['after_s']:.1f} s"
    if "forwarded" in run:
        shown["sent"] = f"{run['forwarded']['signal']}, {_clock(run['forwarded']['time_s'])}"
    if "not-forwarded" in run:
        shown["not sent"] = f"{run['not-forwarded']['signal']}: {run['not-forwarded']['why']}"
    if "hang-up" in run:
        shown["terminal"] = f"went away, {_clock(run['hang-up']['time_s'])}"
    if "exit" in run:
        shown["ended"] = _clock(run["exit"]["time_s"])
    shown["log"] = _log(seen)
    return shown


def _clock(time_s: float) -> str:
    return time.strftime("%F %T", time.localtime(time_s))


def _log(seen: Seen) -> str:
    opened, now = seen.run.get("redirect"), seen.now
    path = str((opened or seen.run["client"])["path" if opened else "log"])
    if opened is None:
        return f"{path}, never opened"
    if seen.blind:
        return f"{path}, not looked at"
    if "no_log" in now:
        return f"{path}, opened, but not there any more: {now['no_log']}"
    if (opened["device"], opened["inode"]) != (now["device"], now["inode"]):
        return f"{path}, but that is not the file that it opened (now inode {now['inode']})"
    return f"{path}, {now['bytes']} bytes, last written {_clock(now['written_s'])}"
