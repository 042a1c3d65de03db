"""Before a run starts: does anything of an earlier one still hold a GPU?"""

import os
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics.redact import redact
from diagnostics.verdict import Status, Verdict

GPU = re.compile(r"/dev/nvidia\d+")
# They hold every GPU of a machine for its whole life, and use none.
SERVICES = {"nvidia-persistenced", "nv-hostengine", "dcgm-exporter"}


@dataclass(frozen=True)
class Holder:
    """A process that has GPUs open: its command line is redacted, `age_s` is in seconds."""

    pid: int
    command: str
    age_s: float
    devices: tuple[str, ...]

    def __str__(self) -> str:
        devices = ", ".join(self.devices)
        return f"{self.command}, for {self.age_s / 3600:.1f} h, holds {devices}"


def probe(gpu: re.Pattern[str] = GPU) -> Verdict:
    """Find out whether a process of an earlier run still holds a GPU.

    Looks into every process's open files and mappings: a leftover holds its memory there, whether
    or not nvidia-smi shows it. Ends nothing.
    """
    found, unreadable = holders(gpu)
    evidence = {f"process {holder.pid}": str(holder) for holder in found}
    if unreadable:
        evidence["cannot be read"] = f"{unreadable} processes of other users"
    if found:
        return Verdict(
            Status.PROBLEM,
            "gpu-held",
            f"{len(found)} process(es) hold GPUs: {', '.join(str(h.pid) for h in found)}",
            evidence,
            "Look at each with `dflash-diag stacks PID`; end your own with `kill PID`.",
        )
    if unreadable:
        return Verdict(
            Status.UNKNOWN,
            "gpu-holders-unreadable",
            f"no process that can be read holds a GPU, but {unreadable} cannot be read",
            evidence,
            "Run this as root.",
        )
    return Verdict(Status.OK, "gpus-free", "no process holds a GPU", evidence)


def holders(gpu: re.Pattern[str] = GPU) -> tuple[list[Holder], int]:
    """Processes that have a GPU open, services left out, and how many could not be looked at."""
    found, unreadable = [], 0
    for process in psutil.process_iter(["name", "cmdline", "create_time"]):
        if process.pid == os.getpid() or process.info["name"] in SERVICES:
            continue
        try:
            devices = sorted({path for path in _opened(process.pid) if gpu.fullmatch(path)})
        except PermissionError:
            unreadable += 1
            continue
        except OSError:
            continue  # it has ended
        if devices:
            command = redact(shlex.join(process.info["cmdline"] or [process.info["name"]]))
            age_s = time.time() - process.info["create_time"]
            found.append(Holder(process.pid, command, age_s, tuple(devices)))
    return found, unreadable


def _opened(pid: int) -> Iterator[str]:
    """Paths of a process's open files and of its mappings."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(descriptor)
        except FileNotFoundError:
            continue  # closed meanwhile
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        yield line.partition("/")[1] + line.partition("/")[2]
