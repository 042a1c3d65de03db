"""The few sizes that compiled layers meet: micro-batches are padded to them.

T context tokens, N blocks of B slots, P = N x B draft slots.

The padding is a document of its own behind all others, with blocks of its own. No other document
sees it, and its slots weigh nothing, so that it changes neither losses nor gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from dflash.anchors import Blocks
from dflash.attention import TILE
from dflash.batches import Batch
from dflash.errors import DflashError
from dflash.layout import Chunk, Layout

MOST_SIZES = 4
WORTHWHILE = 0.98
"""Another size is compiled for where the run then costs at most so much of what it did."""
CANDIDATES = 16  # quantiles of the micro-batches' tokens, and of their blocks
SLOT, CHUNK = 9.0, 8192.0
"""What a draft slot and a pass over a chunk cost, in context tokens (docs/performance.md)."""


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

    @classmethod
    def of(
        cls, tokens: np.ndarray, blocks: np.ndarray, *, block_size: int, chunk_slots: int
    ) -> Self:
        """Sizes for micro-batches of so many tokens and blocks each.

        Args:
            chunk_slots: at most so many slots run at once, but for rounding up to whole tiles.
        """
        needed = _Needed.of(tokens, blocks, block_size)
        contexts, at_once = needed.quantiles(tokens, blocks, chunk_slots)
        costs = {Size(*one): needed.costs(Size(*one)) for one in product(contexts, at_once)}
        largest = [size for size in costs if size.context == contexts[-1]]
        chosen = min((_with_others(size, costs) for size in largest), key=partial(_price, costs))
        taken_M = np.argmin([costs[size] for size in chosen], axis=0)
        context_M, at_once_M = np.array([(size.context, size.blocks) for size in chosen])[taken_M].T
        chunks_M = -(-needed.blocks_M // at_once_M)
        slots = 1 - blocks.sum() / (needed.count_M * chunks_M * at_once_M).sum()
        context = 1 - tokens.sum() / (needed.count_M * context_M).sum()
        return cls(tuple(chosen), block_size, int(chunks_M.max()), (float(slots), float(context)))

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{size.context} tokens with {size.blocks * self.block_size} draft slots at once"
            for size in self.sizes
        )
        slots, tokens = self.padding
        return f"{sizes}; padding is {slots:.0%} of the slots, {tokens:.0%} of the cheaper tokens"

    @property
    def contexts(self) -> list[int]:
        """The lengths of the sizes' contexts, ascending."""
        return [size.context for size in self.sizes]

    def size(self, tokens: int, blocks: int) -> Size:
        """What a micro-batch is padded to. Raises ShapeError."""
        fitting = [size for size in self.sizes if tokens < size.context]
        if not fitting:
            raise ShapeError(
                f"a micro-batch of {tokens} tokens was not foreseen: contexts hold at most "
                f"{self.contexts[-1] - 1}"
            )
        return min(fitting, key=lambda size: _cost(size, blocks, self.block_size))

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


@dataclass(frozen=True)
class _Needed:
    """The sizes of whole tiles that micro-batches need at least, and how many need each."""

    context_M: np.ndarray
    blocks_M: np.ndarray
    count_M: np.ndarray
    block_size: int

    @classmethod
    def of(cls, tokens: np.ndarray, blocks: np.ndarray, block_size: int) -> Self:
        # Room for at least one token of padding: the padding's blocks need an anchor.
        contexts = _rounded_up(tokens + 1, TILE)
        whole = _rounded_up(blocks, _whole(block_size))
        (context_M, blocks_M), count_M = np.unique(
            np.stack([contexts, whole]), axis=1, return_counts=True
        )
        return cls(context_M, blocks_M, count_M, block_size)

    def quantiles(
        self, tokens: np.ndarray, blocks: np.ndarray, chunk_slots: int
    ) -> tuple[list[int], list[int]]:
        """Lengths of the context, and numbers of blocks at once, to choose from; ascending."""
        quantiles = np.linspace(0, 1, CANDIDATES + 1)[1:]
        contexts = _rounded_up(np.quantile(tokens, quantiles, method="inverted_cdf") + 1, TILE)
        wanted = np.quantile(blocks, quantiles, method="inverted_cdf")
        fewest_chunks = np.ceil(wanted * self.block_size / chunk_slots)
        at_once = np.ceil(wanted / fewest_chunks).astype(int)
        at_once = _rounded_up(at_once, _whole(self.block_size))
        return np.unique(contexts).tolist(), np.unique(at_once).tolist()

    def costs(self, size: Size) -> np.ndarray:
        """What they cost together at this size; infinite where it is too small."""
        fits_M = self.context_M <= size.context
        cost_M = self.count_M * _cost(size, self.blocks_M, self.block_size)
        return np.where(fits_M, cost_M, np.inf)


def _with_others(largest: Size, costs: dict[Size, np.ndarray]) -> list[Size]:
    """`largest`, then whichever size saves most, as long as that is worth a compile; ascending."""
    chosen, best_M = [largest], costs[largest]
    while len(chosen) < MOST_SIZES:
        contexts = {size.context for size in chosen}
        others = [size for size in costs if size.context not in contexts]
        if not others:
            break
        added = min(others, key=lambda size: np.minimum(best_M, costs[size]).sum())
        with_it_M = np.minimum(best_M, costs[added])
        if with_it_M.sum() > WORTHWHILE * best_M.sum():
            break
        chosen.append(added)
        best_M = with_it_M
    return sorted(chosen)


def _price(costs: dict[Size, np.ndarray], sizes: list[Size]) -> float:
    """What all micro-batches cost with these sizes, each compile counted as in `WORTHWHILE`."""
    total = np.min([costs[size] for size in sizes], axis=0).sum()
    return float(total) / WORTHWHILE ** len(sizes)


def _whole(block_size: int) -> int:
    """The least number of blocks whose slots are whole tiles."""
    return math.lcm(TILE, block_size) // block_size


def _cost(size: Size, blocks: Any, block_size: int) -> Any:
    """Of so many blocks, or of each of several micro-batches'."""
    chunks = -(-blocks // size.blocks)
    return size.context + chunks * (CHUNK + SLOT * size.blocks * block_size)


def _chunks(blocks: Blocks, at_once: int, anchor: int) -> Iterator[Chunk]:
    """Chunks of one size; the last is filled up with blocks at `anchor` that weigh nothing."""
    for start in range(0, len(blocks.anchor_N), at_once):
        part = blocks.part(slice(start, start + at_once))
        yield Chunk.of(part.filled_up(at_once, anchor))


def _rounded_up(sizes: np.ndarray, to: int) -> np.ndarray:
    return -(-sizes // to) * to
