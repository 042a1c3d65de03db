"""A micro-batch as the drafter reads it: the context, and its blocks in chunks.

T context tokens, N blocks of B slots.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dflash.anchors import Blocks
from dflash.asked import AskedSlots
from dflash.streams import to_device


@dataclass(frozen=True)
class Chunk:
    """Blocks that are drafted in one pass."""

    anchor_N: Tensor
    inputs_NB: Tensor
    asked: AskedSlots

    @classmethod
    def of(cls, blocks: Blocks) -> Self:
        """These blocks."""
        return cls(blocks.anchor_N, blocks.inputs_NB, AskedSlots.of(blocks))

    def to(self, device: torch.device) -> "Chunk":
        """The same on another device."""
        return Chunk(
            to_device(self.anchor_N, device),
            to_device(self.inputs_NB, device),
            self.asked.to(device),
        )

    def pinned(self) -> "Chunk":
        """The same in memory from which a GPU copies while the host goes on."""
        return Chunk(self.anchor_N.pin_memory(), self.inputs_NB.pin_memory(), self.asked.pinned())


@dataclass(frozen=True)
class Layout:
    """What a micro-batch looks like to the drafter; made on the host."""

    document_T: Tensor
    position_T: Tensor
    chunks: tuple[Chunk, ...]

    def to(self, device: torch.device) -> "Layout":
        """The same on another device."""
        return Layout(
            to_device(self.document_T, device),
            to_device(self.position_T, device),
            tuple(chunk.to(device) for chunk in self.chunks),
        )

    def pinned(self) -> "Layout":
        """See `Chunk`."""
        return Layout(
            self.document_T.pin_memory(),
            self.position_T.pin_memory(),
            tuple(chunk.pinned() for chunk in self.chunks),
        )

    def clone(self) -> "Layout":
        """The same in memory of its own, as far as the passes read it."""
        chunks = (
            replace(chunk, anchor_N=chunk.anchor_N.clone(), inputs_NB=chunk.inputs_NB.clone())
            for chunk in self.chunks
        )
        return Layout(self.document_T.clone(), self.position_T.clone(), tuple(chunks))
