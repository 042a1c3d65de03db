"""A micro-batch as the drafter reads it: the context, and its blocks in chunks.

T context tokens, N blocks of B slots.
"""

from collections.abc import Callable
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

    def each(self, change: Callable[[Tensor], Tensor]) -> "Chunk":
        """The same with every tensor changed; see `AskedSlots`."""
        return Chunk(change(self.anchor_N), change(self.inputs_NB), self.asked.each(change))


@dataclass(frozen=True)
class Layout:
    """What a micro-batch looks like to the drafter; made on the host."""

    document_T: Tensor
    position_T: Tensor
    chunks: tuple[Chunk, ...]

    def to(self, device: torch.device) -> "Layout":
        """The same on another device."""
        return self._each(lambda tensor: to_device(tensor, device))

    def pinned(self) -> "Layout":
        """The same in memory from which a GPU copies while the host goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Layout":
        chunks = tuple(chunk.each(change) for chunk in self.chunks)
        return Layout(change(self.document_T), change(self.position_T), chunks)

    def clone(self) -> "Layout":
        """The same in memory of its own, as far as the passes read it."""
        chunks = (
            replace(chunk, anchor_N=chunk.anchor_N.clone(), inputs_NB=chunk.inputs_NB.clone())
            for chunk in self.chunks
        )
        return Layout(self.document_T.clone(), self.position_T.clone(), tuple(chunks))
