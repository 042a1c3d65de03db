"""What the NVIDIA driver says of its GPUs: through NVML, else nvidia-smi, both as children.

A driver that is wedged answers nobody and cannot be interrupted: only a child may wait for it.
"""

import glob
import json
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

ANSWER_S = 15.0
GONE_S = 1.0  # for a child that was killed; one that waits for the driver does not go
BUSY_MIB = 500  # a GPU that nobody uses has less
QUERY = "--query-gpu=index,memory.used,utilization.gpu"
# Needs the optional package nvidia-ml-py. Ends with 3 where there is no package or no NVML.
ASK_NVML = """
import json, sys
try:
    import pynvml as nvml
    nvml.nvmlInit()
except Exception:
    sys.exit(3)
def only(ask, *given):
    try:
        return ask(*given)
    except nvml.NVMLError:
        return None
rows = []
for index in range(nvml.nvmlDeviceGetCount()):
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    version = getattr(nvml, "nvmlMemory_v2", None)  # the first one counts what is reserved as used
    memory = only(nvml.nvmlDeviceGetMemoryInfo, device, version) if version else None
    memory = memory or only(nvml.nvmlDeviceGetMemoryInfo, device)
    rates = only(nvml.nvmlDeviceGetUtilizationRates, device)
    running = only(nvml.nvmlDeviceGetComputeRunningProcesses, device) or []
    used = memory and memory.used >> 20
    rows.append([index, used, rates and rates.gpu, [process.pid for process in running]])
print(json.dumps(rows))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU; what the driver does not tell is None. `pids`: as NVML sees them, if asked."""

    index: int
    used_mib: int | None
    percent: int | None
    pids: tuple[int, ...] = ()

    @property
    def is_told(self) -> bool:
        """Whether the driver says what it would take to call it free."""
        return self.used_mib is not None and self.percent is not None

    @property
    def is_busy(self) -> bool:
        """Whether somebody uses it."""
        return (self.used_mib or 0) > BUSY_MIB or (self.percent or 0) > 0

    def __str__(self) -> str:
        used = "?" if self.used_mib is None else self.used_mib
        percent = "?" if self.percent is None else self.percent
        return f"GPU {self.index}: {used} MiB used, {percent} % busy"


def ask() -> list[Gpu] | None:
    """All GPUs; an empty list where there is no driver, None where there is one and it is mute."""
    for words, read in ((_nvml(), _from_nvml), (_smi(), _from_smi)):
        answer = _answer(words) if words else None
        if answer and (found := read(answer)):
            return found
    return None if device_files() or shutil.which("nvidia-smi") else []


def device_files() -> list[str]:
    """The GPUs that this machine or container was given, as files."""
    return glob.glob("/dev/nvidia[0-9]*")


def _nvml() -> list[str]:
    return [sys.executable, "-c", ASK_NVML]


def _smi() -> list[str]:
    smi = shutil.which("nvidia-smi")
    return [smi, QUERY, "--format=csv,noheader,nounits"] if smi else []


def _answer(words: list[str]) -> str | None:
    """What a child prints; None if it fails, or does not end in time."""
    null = subprocess.DEVNULL
    try:
        child = subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True)
    except OSError:
        return None
    try:
        text, _ = child.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # it is stuck in the driver
            child.communicate(timeout=GONE_S)
        return None
    return text if child.returncode == 0 else None


def _from_nvml(text: str) -> list[Gpu]:
    return [Gpu(index, used, busy, tuple(pids)) for index, used, busy, pids in json.loads(text)]


def _from_smi(text: str) -> list[Gpu]:
    """A value that is "[N/A]" is not told."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [Gpu(*map(_number, row)) for row in rows if len(row) == 3 and row[0].isdigit()]  # type: ignore[arg-type]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
