"""One contender's training step at one size, measured in this process; see bench_peers.py.

    python step_child.py CONTENDER SHAPE_AS_JSON DEVICE STEPS

CONTENDER `ceiling` measures a matrix product instead. Prints one line of JSON.
"""

import json
import os
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# First, so that importing torch is within the limit.
import taking_turns  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from absent import stand_in
from clock import Peak, matrix_tflops, seconds, steady_s
from shapes import Shape

MODULES = {"ours": "ours", "specforge": "peer_specforge", "speculators": "peer_speculators"}


def measure(name: str, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, its peak memory, and the seconds until the first was done."""
    whose = name.partition("-")[0]
    absent = stand_in() if whose != "ours" else None
    module = import_module(MODULES[whose])
    peak = Peak(device)
    started_s = time.perf_counter()
    made = module.contender(shape, device, name)
    first_s = time.perf_counter() - started_s + seconds(made.step, device)
    if device.type == "cuda":
        peak = Peak(device)  # what compiling and tuning take is no part of a step
    found = {"ms": 1e3 * steady_s(made.step, device, calls=steps)}
    found |= {"peak_gb": peak.gb, "first_s": first_s, "uses": made.uses}
    if absent is not None:
        found |= {"version": version_of(whose), "absent": sorted(absent.used)}
    return found


def version_of(package: str) -> str:
    """The installed version, or that it is unknown."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def main(name: str, shape: str, device_name: str, steps: str) -> None:
    device = torch.device(device_name)
    torch.manual_seed(0)
    if name == "ceiling":
        gpu = device.type == "cuda"
        where = torch.cuda.get_device_name(device) if gpu else "CPU, one thread"
        found = {"tflops": matrix_tflops(device, 8192 if gpu else 1024), "device": where}
        found |= {"torch": torch.__version__, "transformers": version_of("transformers")}
    else:
        found = measure(name, Shape(**json.loads(shape)), device, int(steps))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
