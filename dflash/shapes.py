"""The few sizes that compiled layers meet: micro-batches are padded to them.

T context tokens, N blocks of B slots, P = N x B draft slots.

The padding is a document of its own behind all others, with blocks of its own. No other document
sees it, and its slots weigh nothing, so that it changes neither losses nor gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from dflash.anchors import Blocks
from dflash.batches import Batch
from dflash.errors import DflashError
from dflash.layout import Chunk, Layout

SLOT, CHUNK = 9.0, 8192.0
"""What a draft slot and a pass over a chunk cost, in context tokens. A slot: as was measured at
Qwen3-8B's size (docs/performance.md). A chunk: between what it costs there and for small models."""


class ShapeError(DflashError):
    """A micro-batch is larger than anything that was compiled for."""

    remedy = "Please report it with the run's log; --compile none trains without fixed sizes."


@dataclass(frozen=True, order=True)
class Size:
    """What layers are compiled for: a length of the context, and blocks that run at once."""

    context: int
    blocks: int


@dataclass(frozen=True)
class ShapePolicy:
    """Sizes to compile for; a micro-batch takes the one at which it costs least.

    Attributes:
        sizes: ascending, no two of the same context.
        chunks: the most chunks that a micro-batch has.
        padding: the part of all the run's draft slots, and of its context tokens, that is padding.
    """

    sizes: tuple[Size, ...]
    block_size: int
    chunks: int = 1
    padding: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{size.context} tokens with {size.blocks * self.block_size} draft slots at once"
            for size in self.sizes
        )
        slots, tokens = self.padding
        return f"{sizes}; padding is {slots:.0%} of the slots, {tokens:.0%} of the cheaper tokens"

    def size(self, tokens: int, blocks: int) -> Size:
        """What a micro-batch is padded to. Raises ShapeError."""
        fitting = [size for size in self.sizes if tokens < size.context]
        if not fitting:
            raise ShapeError(
                f"a micro-batch of {tokens} tokens was not foreseen: contexts hold at most "
                f"{self.sizes[-1].context - 1}"
            )
        return min(fitting, key=lambda size: cost(size, blocks, self.block_size))

    def layout(self, batch: Batch) -> Layout:
        """The micro-batch at the policy's sizes. Raises ShapeError."""
        tokens = len(batch.tokens_T)
        size = self.size(tokens, len(batch.blocks.anchor_N))
        missing = size.context - tokens
        document = len(batch.lengths)
        return Layout(
            F.pad(batch.document_T, (0, missing), value=document),
            F.pad(batch.position_T, (0, missing)),
            tuple(_chunks(batch.blocks, size.blocks, anchor=tokens)),
        )

    def example(self, size: Size) -> Layout:
        """A micro-batch of that size with one chunk, of which one slot is asked."""
        nothing_T, anchor_N = torch.zeros(size.context).long(), torch.zeros(size.blocks).long()
        blocks_NB = torch.zeros(size.blocks, self.block_size, dtype=torch.long)
        weights_NB = blocks_NB.float()
        weights_NB[0, 1] = 1.0
        blocks = Blocks(anchor_N, blocks_NB, blocks_NB, weights_NB)
        return Layout(nothing_T, nothing_T, (Chunk.of(blocks),))


def layout_of(batch: Batch, shapes: ShapePolicy | None) -> Layout:
    """The micro-batch at the policy's sizes, or as it is, in one chunk. Raises ShapeError."""
    if batch.layout is not None:
        return batch.layout
    if shapes is not None:
        return shapes.layout(batch)
    return Layout(batch.document_T, batch.position_T, (Chunk.of(batch.blocks),))


def laid_out(batch: Batch, shapes: ShapePolicy | None, *, pinned: bool) -> Batch:
    """The micro-batch with its layout, so that the drafter need not make it. Raises ShapeError.

    Args:
        pinned: in memory from which a GPU copies while the host goes on.
    """
    layout = layout_of(batch, shapes)
    return replace(batch, layout=layout.pinned() if pinned else layout)


def cost(size: Size, blocks: Any, block_size: int) -> Any:
    """What so many blocks cost at a size, in context tokens; of one micro-batch or of several."""
    chunks = -(-blocks // size.blocks)
    return size.context + chunks * (CHUNK + SLOT * size.blocks * block_size)


def _chunks(blocks: Blocks, at_once: int, anchor: int) -> Iterator[Chunk]:
    """Chunks of one size; the last is filled up with blocks at `anchor` that weigh nothing."""
    for start in range(0, len(blocks.anchor_N), at_once):
        part = blocks.part(slice(start, start + at_once))
        yield Chunk.of(part.filled_up(at_once, anchor))
