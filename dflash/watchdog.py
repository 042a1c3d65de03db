"""The watchdog: a small process beside the trainer that reads its heartbeat.

A thread could not do it: while C code holds the GIL, no other thread runs. What it finds it writes
to its standard output, a line of JSON each, which a thread of the trainer turns into log lines and,
for a loop that is stuck, into the end of the run. Where that thread cannot run, the watchdog ends
the process itself. It ends with the trainer, and says so if that died without a word.
"""

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from dflash import faults, heartbeat
from dflash.heartbeat import Loop, Snapshot

TICK_S = 0.5
PROGRESS_S = 30.0
DUMP_LIMIT_S = 90.0
ANSWERS = (0, 1, 3)  # exit codes of dflash-diag: with 3 it has asked the process itself
GOODBYE = b"bye\n"


class Watch:
    """One run, looked at every `TICK_S` seconds."""

    def __init__(self, directory: Path, *, abort: bool, grace_s: float) -> None:
        self.directory, self.abort, self.grace_s = directory, abort, grace_s
        self.pid = heartbeat.read(directory / heartbeat.FILE).pid
        self._reported: set[tuple[str, float]] = set()
        self._progress_s: dict[str, float] = {}
        self._fault_bytes = faults.size(directory)

    def tick(self) -> None:
        """Look once: progress of a slow start, a dump that was asked for, a stuck loop."""
        now_s = time.monotonic()
        snapshot = heartbeat.read(self.directory / heartbeat.FILE, with_events=False)
        self._tell_progress(snapshot, now_s)
        if faults.size(self.directory) > self._fault_bytes:  # somebody sent SIGUSR1
            path = self._dump()
            say(kind="dump", path=str(path), summary=_first_line(path))
        overdue = [loop for loop in snapshot.loops if loop.is_overdue(now_s)]
        if overdue:
            loop = min(overdue, key=lambda late: late.since_s)
            if (loop.name, loop.since_s) not in self._reported:
                self._reported.add((loop.name, loop.since_s))
                self._stuck(loop, now_s)

    def _tell_progress(self, snapshot: Snapshot, now_s: float) -> None:
        """A slow compile is no hang: say now and then how far the start has come."""
        for loop in snapshot.loops:
            elapsed_s = loop.elapsed_s(now_s)
            if not loop.has_limit or elapsed_s < PROGRESS_S:
                self._progress_s.pop(loop.name, None)
            elif elapsed_s >= self._progress_s.get(loop.name, 0.0) + PROGRESS_S:
                self._progress_s[loop.name] = elapsed_s
                say(kind="progress", **_described(loop, now_s))

    def _stuck(self, loop: Loop, now_s: float) -> None:
        path = self._dump()
        stuck = {**_described(loop, now_s), "path": str(path), "summary": _first_line(path)}
        say(kind="stuck", **stuck)
        if not self.abort:
            return
        deadline_s = time.monotonic() + self.grace_s
        while time.monotonic() < deadline_s:
            if _trainer_said(deadline_s - time.monotonic()) is not None:
                raise SystemExit
        self._note(
            f"{loop.name} is past its limit and the process has not ended within "
            f"{self.grace_s:g} s: killed. Stacks in {path}: {stuck['summary']}"
        )
        os.kill(self.pid, signal.SIGKILL)
        raise SystemExit

    def _dump(self) -> Path:
        """Stacks of all threads, classified; without an answer, those of the process itself."""
        at = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%f")
        path = self.directory / f"stacks-{at}.txt"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if not _classified(self.directory, file):
                file.write(faults.ask(self.pid, self.directory).encode())
        self._fault_bytes = faults.size(self.directory)
        return path

    def died(self) -> None:
        """The trainer is gone without a word: say what its loops did last."""
        snapshot = heartbeat.read(self.directory / heartbeat.FILE)
        now_s = time.monotonic()
        loops = "; ".join(
            f"{loop.name}: {loop.phase}, for {loop.elapsed_s(now_s):.1f} s"
            for loop in snapshot.loops
            if loop.phase != "ended"
        )
        self._note(f"the trainer (pid {self.pid}) has died without a word: killed? {loops}")

    def _note(self, text: str) -> None:
        """To the log, which the trainer cannot write any more."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR watchdog {text}\n"
        sys.stderr.write(line)
        with (self.directory / "train.log").open("a", encoding="utf-8") as file:
            file.write(line)


def say(**finding: Any) -> None:
    """A line for the trainer's thread."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(finding), flush=True)


def _described(loop: Loop, now_s: float) -> dict[str, Any]:
    return {
        "loop": loop.name,
        "phase": loop.phase,
        "for_s": round(loop.elapsed_s(now_s), 1),
        "limit_s": loop.limit_s,
    }


def _classified(directory: Path, file: BinaryIO) -> bool:
    """Write what `dflash-diag stacks --run` says; False if it gave no answer."""
    command = [sys.executable, "-P", "-m", "diagnostics", "stacks", "--run", str(directory)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=DUMP_LIMIT_S)
        return done.returncode in ANSWERS
    return False


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]


def _trainer_said(within_s: float) -> bytes | None:
    """What the trainer wrote: its goodbye, or nothing at all (b"") when it died; None: not yet."""
    ready, _, _ = select.select([0], [], [], min(TICK_S, max(0.0, within_s)))
    return os.read(0, 64) if ready else None


def main() -> None:
    """Watch the run in a directory until its process says goodbye or is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--abort", action="store_true", help="end a run that is stuck")
    parser.add_argument("--grace-s", type=float, required=True, help="until it is killed")
    arguments = parser.parse_args()
    # A Ctrl-C is meant for the trainer, which says goodbye when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = Watch(arguments.directory, abort=arguments.abort, grace_s=arguments.grace_s)
    while (said := _trainer_said(TICK_S)) is None:
        watch.tick()
    if said != GOODBYE:
        watch.died()


if __name__ == "__main__":
    main()
