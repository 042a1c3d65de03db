"""`dflash-diag launch-check --post-mortem`: there is no log. Which mechanism leaves that behind?

Looks, and changes nothing. A mechanism fits, is excluded by something seen, or cannot be known;
several may fit. Where a process still writes to the log, it is copied back through /proc.
"""

import os
import re
import shutil
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from diagnostics.launch import journal, status
from diagnostics.launch.finding import Finding, Fit
from diagnostics.launch.last_lines import LAST_LINES
from diagnostics.launch.mechanisms import AGAIN, MECHANISMS, Mechanism
from diagnostics.launch.remains import Remains, gather
from diagnostics.processes import GPU
from diagnostics.redact import redact
from diagnostics.render import junit
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

OUTCOMES = {
    Fit.FITS: Outcome.REPRODUCED,
    Fit.EXCLUDED: Outcome.ABSENT,
    Fit.UNKNOWN: Outcome.CANNOT_TELL,
}
AGO = re.compile(r"(\d+)\s*(s|min|h|d)( ago)?")
UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
SHOWN_LINES = 10
TAIL_BYTES = 1 << 16
Found = list[tuple[Mechanism, Finding]]


def probe(
    *,
    log: Path,
    session: str | None = None,
    since: float | None = None,
    recover: Path | None = None,
    gpu: re.Pattern[str] = GPU,
) -> tuple[Verdict, list[junit.Case]]:
    """Which mechanisms explain that this log is missing.

    Args:
        since: when the launch was, in seconds since the epoch; else tmux is asked for the session.
        recover: copy the log there, if a process still has it open. Raises FileExistsError.
    """
    log = Path(os.path.abspath(log))
    name, launched_s = _launch_of(log)
    remains = gather(log, session, launched_s if since is None else since, gpu)
    found = [(mechanism, mechanism.look(remains)) for mechanism in MECHANISMS]
    verdict = _judge(remains, found)
    if name:
        how = f"dflash-diag launch status {name}: {status.probe(name).summary}"
        verdict = _with(verdict, "journal", how)
    if recover is not None:
        verdict = _recovered(verdict, found, recover)
    cases = [
        junit.Case("dflash-diag post-mortem", mechanism.code, OUTCOMES[finding.fit], finding.why)
        for mechanism, finding in found
    ]
    return verdict, cases


def _launch_of(log: Path) -> tuple[str, float | None]:
    """The name under which `dflash-diag launch` made this log, and when; or nothing."""
    for name in journal.names():
        run = journal.last_run(journal.journal_of(name))
        if not run["client"]["prefix"] and run["client"]["log"] == str(log):
            return name, float(run["client"]["time_s"])
    return "", None


def _judge(remains: Remains, found: Found) -> Verdict:
    lines = _last_lines(remains.log) if remains.log_is_new else []
    evidence = _evidence(remains, found)
    if lines:
        evidence = {LAST_LINES: "\n".join(map(redact, lines)), **evidence}
    fitting = [(m, f) for m, f in found if f.fit is Fit.FITS]
    # Where the log has lines, that there is none needs no explanation.
    explaining = [(m, f) for m, f in fitting if not (lines and m.explains == "log")]
    if explaining:
        mechanism, finding = explaining[0]
        more = f" ({len(explaining) - 1} more fit)" if len(explaining) > 1 else ""
        code, summary = f"post-mortem-{mechanism.code}", f"{finding.why}{more}"
        remedy = mechanism.remedy.replace("PID", str(finding.by.pid if finding.by else "PID"))
        return Verdict(Status.PROBLEM, code, summary, evidence, remedy)
    if lines:
        summary = f"{remains.log} is there; its last lines are below"
        return Verdict(Status.OK, "post-mortem-log-there", summary, evidence)
    summary = f"nothing explains that {remains.log} is missing: what can have been leaves no trace"
    return Verdict(Status.UNKNOWN, "post-mortem-no-trace", summary, evidence, AGAIN)


def _evidence(remains: Remains, found: Found) -> dict[str, str]:
    when = "not said: --since TIME would tell leftovers"
    if remains.since is not None:
        when = f"since {time.strftime('%F %T', time.localtime(remains.since))}"
    shown = {"log": str(remains.log), "launched": when}
    if remains.unreadable:
        hint = ": run this as root" if os.geteuid() else ""
        shown["unreadable"] = f"{remains.unreadable} process(es){hint}"
    for fit in (Fit.FITS, Fit.UNKNOWN, Fit.EXCLUDED):
        shown |= {m.code: f"{fit}: {f.why}" for m, f in found if f.fit is fit}
    return shown


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]


def _recovered(verdict: Verdict, found: Found, to: Path) -> Verdict:
    """Copy the log of the first writer. Raises FileExistsError."""
    outputs = [(f.by, f.output) for _, f in found if f.by is not None and f.output is not None]
    if not outputs:
        return _with(verdict, "recovered", "nothing: no process has such a log open")
    process, output = outputs[0]
    descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as copy:
        try:
            with open(f"/proc/{process.pid}/fd/{output.fd}", "rb") as original:
                shutil.copyfileobj(original, copy)
        except OSError as error:
            to.unlink()
            return _with(verdict, "recovered", f"nothing: {error.strerror}")
    size = f"{to.stat().st_size} bytes, in {to}; process {process.pid} still has it open"
    return replace(_with(verdict, "recovered", size), remedy="")


def _with(verdict: Verdict, key: str, value: str) -> Verdict:
    return replace(verdict, evidence={key: value, **verdict.evidence})


def point_in_time(text: str, now: datetime | None = None) -> float:
    """Seconds since the epoch of `2026-11-30 00:10`, `00:10` (the last one), or `30 min ago`.

    Raises ValueError.
    """
    now = now or datetime.now()
    if ago := AGO.fullmatch(text.strip()):
        return now.timestamp() - int(ago[1]) * UNITS_S[ago[2]]
    if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
        hours, minutes, *seconds = map(int, text.split(":"))
        at = now.replace(hour=hours, minute=minutes, second=sum(seconds), microsecond=0)
        return (at if at <= now else at - timedelta(days=1)).timestamp()
    return datetime.fromisoformat(text).timestamp()
