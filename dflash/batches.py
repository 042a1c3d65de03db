"""What travels on the channels: Batch to the target, TargetFeatures to the drafter.

Documents lie one after another, without padding: T tokens in all, N blocks of B draft slots.
F = captured layers x target hidden size, D = target hidden size.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dflash.anchors import Blocks, eligible_anchors, make_blocks, sample_anchors
from dflash.layout import Layout
from dflash.streams import NOTHING_TO_WAIT_FOR, Lanes, Ready, keep_for_this_stream


@dataclass(frozen=True)
class Batch:
    """One micro-batch: documents laid end to end, and the blocks to draft from them. On the host.

    `index` counts micro-batches from the start of the run. A batch without rows is legal: it fills
    up the last optimizer step and weighs nothing.
    """

    index: int
    epoch: int
    tokens_T: Tensor
    lengths: tuple[int, ...]
    document_T: Tensor
    position_T: Tensor
    blocks: Blocks
    rows: tuple[int, ...] = ()
    """The rows of --data-dir that the documents came from."""
    checksum: int = 0
    """CRC-32 of tokens and anchors: two runs that trained on the same agree in it."""
    layout: Layout | None = None
    """As the drafter reads it, where somebody has made that already: see shapes.laid_out."""

    @classmethod
    def drawn(
        cls,
        index: int,
        epoch: int,
        documents: list[tuple[Tensor, Tensor]],
        *,
        block_size: int,
        mask_token_id: int,
        gamma: float,
        per_document: int,
        in_all: int,
        generator: torch.Generator,
        rows: Sequence[int] = (),
    ) -> Self:
        """Documents of (tokens, loss_mask), with anchors drawn by `sample_anchors`."""
        tokens_T, loss_mask_T, lengths, document_T, position_T = pack(documents)
        anchor_N = sample_anchors(
            eligible_anchors(loss_mask_T, document_T),
            document_T,
            per_document=per_document,
            in_all=in_all,
            generator=generator,
        )
        blocks = make_blocks(
            tokens_T,
            loss_mask_T,
            document_T,
            anchor_N,
            block_size=block_size,
            mask_token_id=mask_token_id,
            gamma=gamma,
        )
        checksum = zlib.crc32(anchor_N.numpy().tobytes(), zlib.crc32(tokens_T.numpy().tobytes()))
        return cls(
            index, epoch, tokens_T, lengths, document_T, position_T, blocks, tuple(rows), checksum
        )

    @property
    def is_empty(self) -> bool:
        """True for a filler: nothing to compute."""
        return not self.lengths


@dataclass(frozen=True)
class TargetFeatures:
    """A batch with what the frozen target says about it.

    Attributes:
        features_TF: hidden states after the captured layers, side by side; None for a filler.
        teacher_TD: the target's last hidden state after its final norm, from which lm_head makes
            the soft labels; None unless soft labels are on.
        ready: from when on, in the order of the target's stream, all of it holds its values.
    """

    batch: Batch
    features_TF: Tensor | None
    teacher_TD: Tensor | None
    ready: Ready = NOTHING_TO_WAIT_FOR

    def sent_to(self, device: torch.device, lanes: Lanes) -> "TargetFeatures":
        """Begin the copy to another device, beside the work of this thread's streams."""
        devices = {tensor.device for tensor in self._tensors}
        if devices == {device}:
            return self
        with lanes.open({*devices, device}):
            moved = self.received(device)
            return replace(moved, ready=Ready.after(device))

    def received(self, device: torch.device) -> "TargetFeatures":
        """The same features for this thread's stream of `device`.

        The stream waits until the maker's has made them; the host does not.
        """
        self.ready.wait(*{device, *(tensor.device for tensor in self._tensors)})
        keep_for_this_stream(self._tensors)
        return TargetFeatures(
            self.batch,
            None if self.features_TF is None else self.features_TF.to(device),
            None if self.teacher_TD is None else self.teacher_TD.to(device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the two big tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.features_TF, self.teacher_TD) if t is not None]


@dataclass(frozen=True)
class InputCheck:
    """Which batch it was, and whether what the target said of it is finite; costs one [T] tensor.

    Nothing waits for the device until somebody asks `bad_rows`.
    """

    batch: Batch
    total_T: Tensor | None

    @classmethod
    def of(cls, features: TargetFeatures) -> "InputCheck":
        """Sums over each token's features: a sum is finite where everything in it is."""
        if features.features_TF is None:
            return cls(features.batch, None)
        total_T = features.features_TF.sum(-1, dtype=torch.float32)
        if features.teacher_TD is not None:
            total_T = total_T + features.teacher_TD.sum(-1, dtype=torch.float32)
        return cls(features.batch, total_T)

    def bad_rows(self) -> list[int]:
        """The rows of --data-dir for which the target gave infinities or NaN; waits."""
        if self.total_T is None:
            return []
        documents = self.batch.document_T[~self.total_T.isfinite().cpu()]
        return [self.batch.rows[document] for document in documents.unique().tolist()]


def pack(
    rows: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, tuple[int, ...], Tensor, Tensor]:
    """Lay rows of (tokens, loss_mask) end to end.

    Returns tokens_T, loss_mask_T, lengths, document_T (row of each token) and position_T (from 0 in
    each row).
    """
    lengths = tuple(len(tokens) for tokens, _ in rows)
    tokens_T = torch.cat([tokens for tokens, _ in rows] or [torch.empty(0, dtype=torch.long)])
    mask_T = torch.cat([mask for _, mask in rows] or [torch.empty(0, dtype=torch.bool)])
    document_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths).long())
    position_T = torch.cat([torch.arange(n) for n in lengths] or [torch.empty(0).long()])
    return tokens_T, mask_T, lengths, document_T, position_T
