"""What the reproducers of launch failures share: a trainer to lose, a private directory, the end.

A reproducer is `reproduce(trial) -> Finding`, broken without and mended with `--fixed`. Standard
library only; the launches are real ones, by bash and the tools that they name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125}
DEADLINE_S = 30.0
LINES = 4000  # more than any version of Python keeps in a buffer, at 64 bytes
TRAINER = f"""
import os, signal, sys
for number in range({LINES}):
    print(f"line {{number:06d}} ".ljust(63, "."))
exec(os.environ["DEATH"])
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
RAISES = "raise RuntimeError('boom')"


class CannotTell(Exception):
    """This machine cannot show it, or the run went otherwise than planned."""


@dataclass(frozen=True)
class Finding:
    """What a run showed: a key of EXIT_CODES, why, and what was seen by name."""

    outcome: str
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


def judged(bad: bool, reason: str, **evidence: Any) -> Finding:
    return Finding("reproduced" if bad else "absent", reason, evidence)


class Trial:
    """A directory with train.py in it, in which launches are run."""

    def __init__(self, fixed: bool, folder: Path) -> None:
        self.fixed = fixed
        self.folder = folder
        self.path("train.py").write_text(TRAINER)

    def path(self, name: str) -> Path:
        return self.folder / name

    def launch(self, line: str, death: str = KILLED) -> int:
        """Let bash run this line, with `python3` this one; returns the status that a user sees.

        Everything that it starts is over when this returns. Raises CannotTell after DEADLINE_S.
        """
        needs("bash")
        self._provide_python()
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        env |= {"PATH": f"{self.folder}:{env.get('PATH', os.defpath)}", "DEATH": death}
        reading, writing = os.pipe()  # ends when nobody who inherited it is left
        shell = subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        try:
            status = shell.wait(DEADLINE_S)
            wait_for_end(reading)
        except (subprocess.TimeoutExpired, TimeoutError):
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            raise CannotTell(f"the launch had not ended after {DEADLINE_S:g} s") from None
        finally:
            os.close(reading)
        return 128 - status if status < 0 else status

    def _provide_python(self) -> None:
        python = self.path("python3")
        if not python.is_symlink():
            python.symlink_to(Path(sys.executable).resolve())

    def kept(self, log: str = "train.log") -> int | None:
        """The whole lines in a log; None if there is no log."""
        path = self.path(log)
        if not path.exists():
            return None
        return sum(len(line) == 63 for line in path.read_text().splitlines())


def needs(*tools: str) -> None:
    """Raises CannotTell where one is missing."""
    for tool in tools:
        if shutil.which(tool) is None:
            raise CannotTell(f"{tool} is not installed")


def wait_for_end(pipe: int) -> None:
    """Until all who inherited the other end are gone. Raises TimeoutError after DEADLINE_S."""
    deadline_s = time.monotonic() + DEADLINE_S
    os.set_blocking(pipe, False)
    while True:
        try:
            if not os.read(pipe, 1):
                return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.002)


def main(code: str, mode: str, page: str, reproduce: Callable[[Trial], Finding]) -> NoReturn:
    """Run one reproducer as a program: one JSON line, then its exit code."""
    parser = argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixed", action="store_true", help="launch it as it should be")
    fixed = parser.parse_args().fixed
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="repro-launch-") as folder:
        try:
            finding = reproduce(Trial(fixed, Path(folder)))
        except CannotTell as error:
            finding = Finding("cannot tell", str(error))
    line = {
        "code": code,
        "mode": mode,
        "fixed": fixed,
        "outcome": finding.outcome,
        "reason": finding.reason,
        "evidence": finding.evidence,
        "seconds": round(time.monotonic() - started_s, 3),
    }
    print(json.dumps(line), flush=True)
    sys.exit(EXIT_CODES[finding.outcome])
