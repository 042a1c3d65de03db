"""Summing the replicas' gradients: by NCCL where each has a GPU of its own, else by copies."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from dflash.gradients import Gradients
from dflash.replicas import Exchange
from dflash.streams import Ready

log = logging.getLogger(__name__)

Summing = Callable[[int, list[Gradients]], Gradients]
"""(rank, everyone's gradients by rank, safe to read on this thread's stream) -> their sum."""


def summing(devices: Sequence[torch.device], exchange: Exchange[Any]) -> Summing:
    """How replicas on these devices sum their gradients, with the reason in the log."""
    if len(devices) == 1:
        return lambda _rank, parts: parts[0]
    if have_gpus_of_their_own(devices) and nccl.is_available(
        [torch.empty(1, device=d) for d in devices]
    ):
        log.info("gradients: summed by NCCL %s", ".".join(map(str, nccl.version())))
        return AllReduce(devices, exchange)
    log.info("gradients: summed by copies, not every drafter has a GPU of its own")
    return Copies(devices, exchange)


def have_gpus_of_their_own(devices: Sequence[torch.device]) -> bool:
    """Whether each of those who run on these has a GPU, and shares it with no other."""
    return len({device for device in devices if device.type == "cuda"}) == len(devices)


class Copies:
    """Each replica copies the others' gradients and adds them up, in rank order.

    Nobody leaves before all have copied: a replica's next step overwrites what it brought.
    """

    def __init__(self, devices: Sequence[torch.device], exchange: Exchange[Any]) -> None:
        self.devices, self.exchange = devices, exchange

    def __call__(self, rank: int, parts: list[Gradients]) -> Gradients:
        """The sum, in new tensors on this rank's device. Raises Cancelled."""
        device = self.devices[rank]
        total = Gradients.total(parts, device)
        for copied in self.exchange.gather(rank, Ready.after(device), "sum of gradients"):
            copied.wait(device)
        return total


class AllReduce:
    """NCCL's all-reduce within one process, in place: the same bits on every replica.

    Drafter 0's thread issues it for all, once everyone has brought gradients: NCCL's communicators
    have no lock, and a replica that never comes would leave the others' kernels spinning. It runs
    on streams of its own, which the replicas' streams wait for.
    """

    def __init__(self, devices: Sequence[torch.device], exchange: Exchange[Any]) -> None:
        self.devices, self.exchange = devices, exchange
        self.streams = [torch.cuda.Stream(device) for device in devices]
        # Here, before any thread runs: making the communicators synchronises every device.
        self._sum([torch.ones(1, device=device) for device in devices])
        for stream in self.streams:
            stream.synchronize()

    def __call__(self, rank: int, parts: list[Gradients]) -> Gradients:
        """The sum, in this rank's own tensors. Raises Cancelled."""
        done = self._issue(parts) if rank == 0 else None
        ready = self.exchange.gather(rank, done, "sum of gradients")[0]
        assert ready is not None
        ready[rank].wait(self.devices[rank])
        return parts[rank]

    def _issue(self, parts: list[Gradients]) -> list[Ready]:
        for device, stream in zip(self.devices, self.streams, strict=True):
            # This thread's stream of the device has waited for the replica that made the gradients.
            stream.wait_stream(torch.cuda.current_stream(device))
        for tensors in zip(*(part.main for part in parts), strict=True):
            self._sum(tensors)
        for tensors in zip(*(part.cap or [] for part in parts), strict=True):
            self._sum(tensors)
        ready = []
        for device, stream in zip(self.devices, self.streams, strict=True):
            with torch.cuda.stream(stream):
                ready.append(Ready.after(device))
        return ready

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        nccl.all_reduce(tensors, streams=self.streams)
