"""The trainer's side of the watchdog: start it, allow it to look, and act on what it says."""

import contextlib
import ctypes
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash.concurrency import Scope
from dflash.errors import DflashError
from dflash.faults import stacks_on_signal
from dflash.sections import RunConfig
from dflash.watchdog import GOODBYE

log = logging.getLogger(__name__)
PACKAGE_DIR = Path(__file__).resolve().parent
KILL_AFTER_S = 20.0
PR_SET_PTRACER = 0x59616D61  # prctl(2), of the Yama security module


class StuckLoop(DflashError):
    """A loop has been at one piece of work for longer than its limit."""

    remedy = (
        "Look at the stacks in that file. If the work is merely slow, raise --stall-timeout-s (or "
        "--start-timeout-s, before the first step)."
    )


@contextmanager
def watched(directory: Path, run: RunConfig, scope: Scope) -> Iterator[None]:
    """Within, a watchdog reads the heartbeat in `directory` and cancels the scope of a stuck run.

    SIGUSR1 writes all stacks to files there and changes nothing else.
    """
    with stacks_on_signal(directory):
        if run.on_stuck == "off":
            yield
            return
        child = _start(directory, run)
        _allow_to_look(child.pid)
        leaving = threading.Event()
        listener = threading.Thread(
            target=_listen, args=(child, run, scope, leaving), name="watchdog", daemon=True
        )
        listener.start()
        try:
            yield
        finally:
            leaving.set()
            _say_goodbye(child)
            listener.join(run.stop_grace_s)


def _start(directory: Path, run: RunConfig) -> subprocess.Popen[str]:
    grace_s = run.stop_grace_s + KILL_AFTER_S
    command = [sys.executable, "-P", "-m", "dflash.watchdog", str(directory.resolve())]
    command += ["--grace-s", str(grace_s), *(["--abort"] if run.on_stuck == "abort" else [])]
    paths = [str(PACKAGE_DIR.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=PACKAGE_DIR.parent,
    )


def _allow_to_look(pid: int) -> None:
    """Where Yama lets a process be traced by its ancestors only, name the watchdog as well."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _say_goodbye(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(GOODBYE.decode())
        child.stdin.close()
    try:
        child.wait(5.0)
    except subprocess.TimeoutExpired:  # it is in the middle of a dump
        child.kill()
        child.wait()


def _listen(
    child: subprocess.Popen[str], run: RunConfig, scope: Scope, leaving: threading.Event
) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        finding = json.loads(line)
        if finding["kind"] == "progress":
            log.info("%s: %s, %.0f s so far", finding["loop"], finding["phase"], finding["for_s"])
        elif finding["kind"] == "dump":
            log.warning("stacks in %s: %s", finding["path"], finding["summary"])
        else:
            _stuck(finding, run, scope)
    if not leaving.is_set():
        log.error("the watchdog has ended: from here on nobody sees a loop that is stuck")


def _stuck(finding: dict[str, Any], run: RunConfig, scope: Scope) -> None:
    what = (
        f"{finding['loop']} is past its limit: {finding['phase']!r} for {finding['for_s']:.0f} s, "
        f"limit {finding['limit_s']:g} s"
    )
    log.error("%s; stacks in %s\n%s", what, finding["path"], finding["summary"])
    if run.on_stuck == "abort":
        scope.cancel(what, StuckLoop(f"{what}; stacks in {finding['path']}"))
