"""What runs beside the trainer, on the launcher's side: starts all, and writes the journal.

Standard library only, so that it starts at once, whatever is installed or broken.
"""

import fcntl
import json
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from diagnostics.launch import onsite
from diagnostics.launch.behind import Unreachable, ask, through
from diagnostics.launch.journal import append, last_run, parsed, records
from diagnostics.launch.onsite import LONG_S, NOT_STARTED, POLL_S, WATCHED, Record, Report

SIGNAL_S = 20.0  # for a prefix to carry a signal to the other side
ENDS = {"exit", "failed"}


def beside(path: str) -> int:
    """On the launcher's side: take the launch from its file, which may hold secrets, and do it."""
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(path)
    report = _journal(spec["journal"], spec["run"])
    if not _takes_over(spec, report):
        return NOT_STARTED
    _show(f"log: {spec['log']}\nhow it goes: dflash-diag launch status {spec['name']}")
    os.environ.clear()
    os.environ.update(spec["env"])
    code = (relay if spec.get("prefix") else onsite.supervise)(spec, report)
    last = records(spec["journal"])[-1]
    details = (f"{key} {last[key]}" for key in ("status", "signal", "why") if key in last)
    _show(f"{last['stage']}: {', '.join(details)}")
    return code


def _journal(path: str, run: str) -> Report:
    def report(stage: str, **fields: Any) -> None:
        try:
            append(path, {"run": run, "stage": stage, "time_s": time.time(), **fields})
        except OSError as error:
            _show(f"the journal {path} cannot be written: {error}")

    return report


def _takes_over(spec: Record, report: Report) -> bool:
    """Write down that it runs, unless its client gave up or a later one has taken the name."""
    with open(spec["journal"], encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # no client decides meanwhile
        launch = last_run(spec["journal"])
        if launch["client"]["run"] != spec["run"] or "failed" in launch:
            report("superseded")
            return False
        pane, own = os.environ.get("TMUX_PANE"), os.getpid()
        report("supervisor", tmux_pane=pane, **onsite.known(own, onsite.stat(own)))
        return True


def _show(text: str) -> None:
    with suppress(OSError):  # the terminal is gone
        print(text, flush=True)


def relay(spec: Record, report: Report) -> int:
    """Keep the journal on this side of what is supervised on the other."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    reading, writing = os.pipe()
    there = {key: spec[key] for key in ("command", "log")}
    try:
        words = through(spec["prefix"], spec["python"], "inside", there)
        pid = onsite.spawn(words, writing, dict(os.environ))
    except OSError as error:
        report("failed", step="prefix", why=str(error))
        return NOT_STARTED
    os.close(writing)
    report("prefix", **onsite.known(pid, onsite.stat(pid)))
    other, ended = _OtherSide(reading, report), None
    while ended is None or not other.is_over():
        got = signal.sigtimedwait(WATCHED, LONG_S if ended is None else POLL_S)
        if got is not None and got.si_signo != signal.SIGCHLD and onsite.is_meant(got, report):
            if other.process is not None:
                _carry(spec, other.process, got.si_signo, report)
            elif ended is None:
                os.kill(pid, got.si_signo)
        if ended is None and (waited := os.waitpid(pid, os.WNOHANG))[0]:
            ended = onsite.exit_code(waited[1])
    return other.outcome(ended)


class _OtherSide:
    """Reads the reports from there, and remembers what else was said."""

    def __init__(self, reading: int, report: Report) -> None:
        self.process: Record | None = None
        self._last: Record = {}
        self._said: deque[str] = deque(maxlen=5)
        self._report = report
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._thread.start()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = parsed(line)
                if record is None:
                    self._said.append(line.rstrip())
                    continue
                self._report(**record)
                self._last = record
                if record["stage"] == "exec":
                    self.process = {k: record[k] for k in ("pid", "start_ticks", "boot_id")}

    def is_over(self) -> bool:
        """Whether nothing more will come: that the prefix was killed does not mean that."""
        return self._last.get("stage") in ENDS or not self._thread.is_alive()

    def outcome(self, code: int) -> int:
        """The prefix has ended with this: was that the trainer's end, or the connection's?"""
        if self._last.get("stage") not in ENDS:
            self._report("lost", **onsite.ending(code), said=list(self._said))
        return 128 - code if code < 0 else code


def _carry(spec: Record, process: Record, number: int, report: Report) -> None:
    """A signal, by a second run of the prefix: no prefix is sure to pass on its own."""
    wanted = {"process": process, "number": number}
    try:
        ask(spec["prefix"], spec["python"], "send", wanted, within_s=SIGNAL_S)
    except Unreachable as error:
        report("not-forwarded", signal=signal.Signals(number).name, why=str(error))
