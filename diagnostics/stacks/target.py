"""Which process is meant, and what is known of it besides its stacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from diagnostics.redact import redact

if TYPE_CHECKING:  # not at import: another distribution may own that name
    from dflash.heartbeat import Snapshot


class NoTarget(Exception):
    """There is no such process, or more than one."""


@dataclass(frozen=True)
class Target:
    """A process; of a run of `dflash train` also its directory and heartbeat."""

    pid: int
    run: Path | None = None
    beats: Snapshot | None = None


def of_pid(pid: int) -> Target:
    """The process with that number. Raises NoTarget."""
    if not psutil.pid_exists(pid):
        raise NoTarget(f"there is no process {pid}")
    return Target(pid)


def of_name(pattern: str) -> Target:
    """The one process whose command line contains the pattern. Raises NoTarget."""
    mine = {process.pid for process in psutil.Process().parents()} | {psutil.Process().pid}
    found = {
        process.pid: " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in mine and pattern in " ".join(process.info["cmdline"] or [])
    }
    if len(found) != 1:
        listed = "".join(f"\n  {pid}  {redact(line)[:80]}" for pid, line in found.items())
        raise NoTarget(f"--name {pattern}: {len(found)} processes have it{listed}")
    return Target(next(iter(found)))


def of_run(directory: Path) -> Target:
    """The process of the run in that --output-dir, whether it lives or not. Raises NoTarget."""
    from dflash import heartbeat

    try:
        beats = heartbeat.read(directory / heartbeat.FILE)
    except (OSError, ValueError) as error:
        raise NoTarget(f"--run {directory}: no heartbeat can be read there: {error}") from error
    return Target(beats.pid, directory, beats)
