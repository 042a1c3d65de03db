"""Run a reproducer as a child program: a hang or a crash in it is a finding, not a casualty.

A reproducer says its outcome on its last line as JSON and exits 10 reproduced, 0 absent, 125 cannot
tell; 1 is left to Python's own uncaught exceptions.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

DIAGNOSTICS_DIR = Path(__file__).resolve().parent


class Outcome(StrEnum):
    """What became of one run. Only `absent` means that the failure did not happen."""

    REPRODUCED = "reproduced"
    ABSENT = "absent"
    CANNOT_TELL = "cannot tell"
    CRASHED = "crashed"
    HUNG = "hung"
    MEASURED = "measured"  # a number was asked for, not a failure


EXIT_CODES = {10: Outcome.REPRODUCED, 0: Outcome.ABSENT, 125: Outcome.CANNOT_TELL}


@dataclass(frozen=True)
class Result:
    """One run of a reproducer: what happened, why we say so, and for how many seconds it ran."""

    outcome: Outcome
    reason: str
    seconds: float
    report: Mapping[str, Any] = field(default_factory=dict)


def reproducer_dir() -> Path:
    """Where the reproducers lie: inside the installed package, or beside it in a checkout."""
    inside = DIAGNOSTICS_DIR / "repro"
    return inside if inside.is_dir() else DIAGNOSTICS_DIR.with_name("repro")


def reproducers() -> dict[str, Path]:
    """Code (`DF001`) -> program, in the order of the codes."""
    paths = sorted(reproducer_dir().glob("df[0-9][0-9][0-9]_*.py"))
    return {path.name[:5].upper(): path for path in paths}


def run(program: Path, arguments: tuple[str, ...] = (), *, timeout_s: float) -> Result:
    """Run one reproducer in a process group of its own and kill the group after `timeout_s`."""
    started_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        reason = f"still running after {timeout_s:g} s, and killed"
        return Result(Outcome.HUNG, reason, time.monotonic() - started_s)
    finally:
        _end_group(child)
    return _read(child.returncode, out, err, time.monotonic() - started_s)


def _end_group(child: subprocess.Popen[str]) -> None:
    """Leave nothing of the child behind, whatever ended the wait for it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _read(code: int, out: str, err: str, seconds: float) -> Result:
    report = _last_json(out)
    outcome = EXIT_CODES.get(code)
    if outcome is None:
        return Result(Outcome.CRASHED, _crash_reason(code, err), seconds, report)
    if not report:
        reason = f"exit code {code}, but no JSON on the last line"
        return Result(Outcome.CANNOT_TELL, reason, seconds)
    return Result(outcome, str(report.get("reason", "")), seconds, report)


def _last_json(out: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _crash_reason(code: int, err: str) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {last_line(err)}"


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
