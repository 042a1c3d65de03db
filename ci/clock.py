"""Seconds and bytes of a piece of work, on the CPU or a GPU, and the ceiling to hold them to."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from taking_turns import alone

GB = 1e9


def working_dtype(device: torch.device) -> torch.dtype:
    """What matrix products are made in: bfloat16 on a GPU, float32 on the CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds from the call until the device has done it."""
    wait(device)
    started_s = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started_s


def median_s(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 2
) -> float:
    """Median seconds of so many calls, after some that are not counted."""
    for _ in range(warm_up):
        seconds(work, device)
    with alone():
        return statistics.median(seconds(work, device) for _ in range(repeats))


def steady_s(work: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Seconds of a call among so many, one after the other, as in training; the median of three.

    Nobody waits for the device in between, unless the work itself does.
    """

    def in_a_row() -> None:
        for _ in range(calls):
            work()

    return median_s(in_a_row, device, repeats=3, warm_up=1) / calls


class Peak:
    """The most memory in use since it was made: of a GPU's allocator, or of this process.

    On the CPU only what was added meanwhile: the interpreter and its libraries do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            wait(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _process_peak()

    @property
    def gb(self) -> float:
        """The peak in 1e9 bytes; of a GPU all that the allocator held, what lay there before too.

        Held, not in use: what CUDA graphs replay in does not count as in use.
        """
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / GB
        return self.added_gb

    @property
    def added_gb(self) -> float:
        """How far it rose, in 1e9 bytes."""
        if self.device.type == "cuda":
            return (torch.cuda.max_memory_allocated(self.device) - self.before) / GB
        return (_process_peak() - self.before) / GB


def _process_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def matrix_tflops(device: torch.device, size: int) -> float:
    """What a product of two square matrices reaches, on random data: the ceiling of a step."""
    left, right = (
        torch.randn(size, size, device=device, dtype=working_dtype(device)) for _ in range(2)
    )
    out = torch.empty_like(left)
    taken_s = median_s(lambda: torch.mm(left, right, out=out), device, repeats=30, warm_up=5)
    return 2 * size**3 / taken_s / 1e12
