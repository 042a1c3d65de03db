"""Which sizes to compile for: those with which all micro-batches of a run cost least.

M different sizes that micro-batches need.
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Self

import numpy as np

from dflash.attention import TILE
from dflash.shapes import ShapePolicy, Size, cost

MOST_SIZES = 4
WORTHWHILE = 0.98
"""Another size is compiled for where the run then costs at most so much of what it did."""
CANDIDATES = 16  # quantiles of the micro-batches' tokens, and of their blocks


def choose_sizes(
    tokens: np.ndarray, blocks: np.ndarray, *, block_size: int, chunk_slots: int
) -> ShapePolicy:
    """Sizes for micro-batches of so many tokens and blocks each.

    Args:
        chunk_slots: at most so many slots run at once, but for rounding up to whole tiles.
    """
    contexts, at_once = _candidates(tokens, blocks, block_size, chunk_slots)
    needed = _Needed.of(tokens, blocks, contexts, block_size)
    sizes = [Size(*pair) for pair in product(contexts, at_once)]
    costs = {size: needed.costs(size) for size in sizes}
    largest = [size for size in sizes if size.context == contexts[-1]]
    chosen = min((_with_others(size, costs) for size in largest), key=partial(_price, costs))
    taken_M = np.argmin([costs[size] for size in chosen], axis=0)
    context_M, at_once_M = np.array([(size.context, size.blocks) for size in chosen])[taken_M].T
    chunks_M = -(-needed.blocks_M // at_once_M)
    slots = 1 - blocks.sum() / (needed.count_M * chunks_M * at_once_M).sum()
    context = 1 - tokens.sum() / (needed.count_M * context_M).sum()
    padding = (float(slots), float(context))
    return ShapePolicy(tuple(chosen), block_size, int(chunks_M.max()), padding)


@dataclass(frozen=True)
class _Needed:
    """What micro-batches need at least, a candidate's context and blocks, and how many need it."""

    context_M: np.ndarray
    blocks_M: np.ndarray
    count_M: np.ndarray
    block_size: int

    @classmethod
    def of(
        cls, tokens: np.ndarray, blocks: np.ndarray, contexts: list[int], block_size: int
    ) -> Self:
        context_N = np.array(contexts)[np.searchsorted(contexts, _context(tokens))]
        least_2N = np.stack([context_N, _whole_tiles(blocks, block_size)])
        (context_M, blocks_M), count_M = np.unique(least_2N, axis=1, return_counts=True)
        return cls(context_M, blocks_M, count_M, block_size)

    def costs(self, size: Size) -> np.ndarray:
        """What they cost together at this size; infinite where it is too small."""
        fits_M = self.context_M <= size.context
        return np.where(fits_M, self.count_M * cost(size, self.blocks_M, self.block_size), np.inf)


def _candidates(
    tokens: np.ndarray, blocks: np.ndarray, block_size: int, chunk_slots: int
) -> tuple[list[int], list[int]]:
    """Lengths of the context, and numbers of blocks at once, to choose from; both ascending."""
    quantiles = np.linspace(0, 1, CANDIDATES + 1)[1:]
    contexts = _context(np.quantile(tokens, quantiles, method="inverted_cdf"))
    wanted = np.quantile(blocks, quantiles, method="inverted_cdf")
    fewest_chunks = np.ceil(wanted * block_size / chunk_slots)
    at_once = _whole_tiles(np.ceil(wanted / fewest_chunks).astype(int), block_size)
    return np.unique(contexts).tolist(), np.unique(at_once).tolist()


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


def _context(tokens: np.ndarray) -> np.ndarray:
    """Whole tiles with room for at least one token of padding, an anchor for its blocks."""
    return _rounded_up(tokens + 1, TILE)


def _whole_tiles(blocks: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks whose slots are whole tiles."""
    return _rounded_up(blocks, math.lcm(TILE, block_size) // block_size)


def _rounded_up(sizes: np.ndarray, to: int) -> np.ndarray:
    return -(-sizes // to) * to
