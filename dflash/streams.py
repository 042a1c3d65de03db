"""CUDA streams: one per thread, and how tensors go from one to another. No-ops on the CPU."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within, the calling thread works on `device`, on a stream that no other thread uses."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@dataclass(frozen=True)
class Ready:
    """The moment, in a stream's order, from which tensors hold their values.

    The thread that made them takes it with `after`; whoever reads them on another stream calls
    `wait` first. The host waits for nothing.
    """

    event: torch.cuda.Event | None

    @classmethod
    def after(cls, device: torch.device) -> Self:
        """When all work queued so far on this thread's stream of `device` is done."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def wait(self, *devices: torch.device) -> None:
        """Let this thread's streams of these devices wait; those on the CPU need not."""
        for device in devices:
            if self.event is not None and device.type == "cuda":
                self.event.wait(torch.cuda.current_stream(device))


NOTHING_TO_WAIT_FOR = Ready(None)


class HostCopy:
    """A tensor's copy on the host, queued: the device goes on while somebody waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        if tensor.is_cuda:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
        self._ready = Ready.after(tensor.device)

    def wait(self) -> Tensor:
        """The copy, once it is there: what was queued after it is not waited for."""
        if self._ready.event is not None:
            self._ready.event.synchronize()
        return self._copy


class Lanes:
    """Streams of one thread for copies between devices, beside its own work on them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def open(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Within, this thread's work on these devices goes to their lanes."""
        with ExitStack() as stack:
            for device in devices:
                if device.type == "cuda":
                    lane = self._streams.setdefault(device, torch.cuda.Stream(device))
                    stack.enter_context(torch.cuda.stream(lane))
            yield


def keep_for_this_stream(tensors: Iterable[Tensor]) -> None:
    """Tell the allocator that this thread's stream reads tensors that another stream made.

    Otherwise it would give their memory, once they are dropped, to the maker's next tensors, while
    this stream may still be reading.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, in the order of this thread's stream; the host does not wait."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
