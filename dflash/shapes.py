"""The few sizes that compiled layers meet: micro-batches are padded to them.

T context tokens, N blocks of B slots, P = N x B draft slots.

The padding is a document of its own behind all others, with blocks of its own. No other document
sees it, and its slots weigh nothing, so that it changes neither losses nor gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

from dflash.anchors import Blocks
from dflash.attention import TILE
from dflash.batches import Batch
from dflash.errors import DflashError
from dflash.layout import Chunk, Layout

CONTEXT_SIZES = 4


class ShapeError(DflashError):
    """A micro-batch is larger than anything that was compiled for."""

    remedy = "Please report it with the run's log; --compile none trains without fixed sizes."


@dataclass(frozen=True)
class ShapePolicy:
    """Sizes to compile for: each length of the context with one number of blocks.

    Attributes:
        contexts: tokens, ascending; the next larger one is taken.
        blocks: draft blocks that run at once; more of them run in several chunks.
        chunks: how many the largest micro-batch has.
        padding: the part of all the run's draft slots, and of its context tokens, that is padding.
    """

    contexts: tuple[int, ...]
    blocks: int
    block_size: int
    chunks: int = 1
    padding: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(
        cls, tokens: np.ndarray, blocks: np.ndarray, *, block_size: int, chunk_slots: int
    ) -> Self:
        """Sizes for micro-batches of so many tokens and blocks each.

        Args:
            chunk_slots: at most so many slots run at once, but for rounding up to whole tiles.
        """
        quantiles = np.linspace(0, 1, CONTEXT_SIZES + 1)[1:]
        # Room for at least one token of padding: the padding's blocks need an anchor.
        wanted = np.quantile(tokens, quantiles, method="higher") + 1
        contexts = np.unique(_rounded_up(wanted, TILE))
        most = int(blocks.max())
        chunks = math.ceil(most * block_size / chunk_slots)
        step = math.lcm(TILE, block_size) // block_size
        size = int(_rounded_up(np.array(math.ceil(most / chunks)), step))
        padded_slots = np.ceil(blocks / size).sum() * size
        padded_tokens = contexts[np.searchsorted(contexts, tokens + 1)].sum()
        padding = (1 - blocks.sum() / padded_slots, 1 - tokens.sum() / padded_tokens)
        return cls(
            tuple(contexts.tolist()),
            size,
            block_size,
            math.ceil(most / size),
            (float(padding[0]), float(padding[1])),
        )

    def __str__(self) -> str:
        contexts = ", ".join(map(str, self.contexts))
        slots, tokens = self.padding
        return (
            f"{self.blocks * self.block_size} draft slots at once, contexts of {contexts} tokens; "
            f"{slots:.0%} of the slots and {tokens:.0%} of the tokens are padding"
        )

    def context(self, tokens: int) -> int:
        """The length that a context of so many tokens is padded to. Raises ShapeError."""
        for length in self.contexts:
            if tokens < length:
                return length
        raise ShapeError(
            f"a micro-batch of {tokens} tokens was not foreseen: contexts hold at most "
            f"{self.contexts[-1] - 1}"
        )

    def layout(self, batch: Batch) -> Layout:
        """The micro-batch at the policy's sizes. Raises ShapeError."""
        tokens = len(batch.tokens_T)
        missing = self.context(tokens) - tokens
        document = len(batch.lengths)
        return Layout(
            F.pad(batch.document_T, (0, missing), value=document),
            F.pad(batch.position_T, (0, missing)),
            tuple(self._chunks(batch.blocks, anchor=tokens)),
        )

    def _chunks(self, blocks: Blocks, anchor: int) -> Iterator[Chunk]:
        """Chunks of one size; the last is filled up with blocks at `anchor` that weigh nothing."""
        for start in range(0, len(blocks.anchor_N), self.blocks):
            part = blocks.part(slice(start, start + self.blocks))
            yield Chunk.of(part.filled_up(self.blocks, anchor))

    def example(self, context: int) -> Layout:
        """A micro-batch of so many tokens and one chunk, of which one slot is asked."""
        nothing_T, anchor_N = torch.zeros(context).long(), torch.zeros(self.blocks).long()
        blocks_NB = torch.zeros(self.blocks, self.block_size, dtype=torch.long)
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


def _rounded_up(sizes: np.ndarray, to: int) -> np.ndarray:
    return -(-sizes // to) * to
