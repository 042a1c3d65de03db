"""The draft slots that have a loss, laid out for the lm_head.

N blocks of B slots; S of their slots are asked: their weight is above 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dflash.anchors import Blocks
from dflash.streams import to_device


@dataclass(frozen=True)
class AskedSlots:
    """What the loss must know of N blocks.

    Made on the host, so that nobody waits for a device to learn how much there is to do.

    Attributes:
        shape: (N, B).
        slot_S: index of each asked slot among the N x B, in ascending order of the row it learns
            from.
        label_S, weight_S: see `Blocks`.
        row_U: the context tokens whose target rows teach the slots, each once, ascending.
        rank_S: where each slot's row is in row_U. host_rank_S: the same, always on the host.
    """

    shape: tuple[int, int]
    slot_S: Tensor
    label_S: Tensor
    weight_S: Tensor
    row_U: Tensor
    rank_S: Tensor
    host_rank_S: Tensor

    @classmethod
    def of(cls, blocks: Blocks) -> Self:
        """Those of blocks on the host."""
        count, block_size = blocks.weights_NB.shape
        # Slot k of the block at anchor a learns from the target's output at a + k - 1.
        row_P = (blocks.anchor_N[:, None] + torch.arange(block_size) - 1).flatten()
        asked_S = blocks.weights_NB.flatten().nonzero().flatten()
        slot_S = asked_S[row_P[asked_S].argsort(stable=True)]
        row_U, rank_S = row_P[slot_S].unique_consecutive(return_inverse=True)
        return cls(
            (count, block_size),
            slot_S,
            blocks.labels_NB.flatten()[slot_S],
            blocks.weights_NB.flatten()[slot_S],
            row_U,
            rank_S,
            rank_S,
        )

    def __len__(self) -> int:
        return len(self.slot_S)

    def to(self, device: torch.device) -> Self:
        """The same slots on another device."""
        return self.each(lambda tensor: to_device(tensor, device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed, but for the one that stays on the host."""
        names = ("slot_S", "label_S", "weight_S", "row_U", "rank_S")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def rows(self, part: slice) -> slice:
        """Which of row_U teach these slots."""
        first, last = self.host_rank_S[part][[0, -1]].tolist()
        return slice(first, last + 1)
