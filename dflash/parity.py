"""Train/serve parity: does the drafter see in training what it sees when it serves?

At the very anchors that real decoding drafted from, the training layout (documents packed, a block
at every token, all under the training mask) must predict the same tokens. Where a mask leaks or a
position is off by one, training looks wonderful and serving does not (z-lab/dflash#41: accuracy .99
in training, acceptance .12). T packed tokens, N anchors, B slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash.anchors import make_blocks
from dflash.batches import Batch, pack
from dflash.decode import Step
from dflash.drafter import Drafter, autocast
from dflash.losses import Objective, block_losses
from dflash.shapes import layout_of
from dflash.target import FrozenHead, Target

# Shares of right slots further apart than this are no rounding: what --parity reports as a gap.
TOLERANCE = 0.05
# Documents packed into one pass of the training layout: enough that each has neighbours.
DOCUMENTS_PER_PASS = 8
# Tokens of a text that blocks start at; drafts after them are not compared. Bounds the mask.
ANCHORS_PER_DOCUMENT = 256


@dataclass(frozen=True)
class SlotParity:
    """One slot of the block, from 1 on.

    Attributes:
        asked: drafts whose true token at this slot is known: the text went on that far.
        training, decoding: share of them that was right under the training mask, and in decoding.
        accepted: share that was right in decoding together with all slots before it.
    """

    slot: int
    asked: int
    training: float
    decoding: float
    accepted: float

    @property
    def gap(self) -> float:
        """How much better the training mask makes it look; negative where it looks worse."""
        return self.training - self.decoding

    @property
    def is_wrong(self) -> bool:
        """Whether the two disagree by more than rounding explains."""
        return abs(self.gap) > TOLERANCE


@dataclass(frozen=True)
class DecodedText:
    """A prompt and the passes that decoded its continuation, all with plain (chain) drafts."""

    prompt: list[int]
    steps: Sequence[Step]

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.prompt, *(token for step in self.steps for token in step.tokens)]

    @property
    def anchors(self) -> range:
        """Where training could start a block."""
        first = len(self.prompt)
        return range(first, min(len(self.tokens) - 1, first + ANCHORS_PER_DOCUMENT))

    @property
    def drafts(self) -> list[tuple[int, list[int]]]:
        """(anchor, drafted tokens) of every pass that drafted at one of them."""
        drafted = ((step.anchor, step.tree) for step in self.steps)
        return [(a, t.tokens[1:]) for a, t in drafted if t is not None and a in self.anchors]


def slot_parity(
    target: Target, drafter: Drafter, head: FrozenHead, texts: Sequence[DecodedText]
) -> list[SlotParity]:
    """The table of all slots over all texts; empty when nothing was drafted."""
    drafted = [text for text in texts if text.drafts]
    counts_4B = torch.zeros(4, drafter.config.block_size, dtype=torch.long)
    for start in range(0, len(drafted), DOCUMENTS_PER_PASS):
        some = drafted[start : start + DOCUMENTS_PER_PASS]
        counts_4B += torch.stack([*_as_in_training(target, drafter, head, some), *_served(some)])
    return [
        SlotParity(slot, asked, right / asked, served / asked, accepted / asked)
        for slot, (asked, right, served, accepted) in enumerate(counts_4B.T.tolist())
        if asked
    ]


@torch.no_grad()
def _as_in_training(
    target: Target, drafter: Drafter, head: FrozenHead, texts: Sequence[DecodedText]
) -> tuple[Tensor, Tensor]:
    """Per slot, how many are asked and right, [B] each, by the trainer's own code."""
    device = head.embedding_VD.device
    batch = _batch(drafter, texts)
    layout = layout_of(batch, None).to(device)
    (chunk,) = layout.chunks
    features_TF, _ = target.hidden(batch.tokens_T, batch.lengths, final=False)
    with autocast(device, head.embedding_VD.dtype):
        hidden_PD = drafter(
            head.embedding_VD[chunk.inputs_NB.flatten()],
            features_TF.to(device),
            layout.document_T,
            layout.position_T,
            chunk.anchor_N,
        )
    only_count = Objective(kl_weight=0.0, kl_temperature=1.0, cap_lambda=0.0)
    _, _, sums = block_losses(hidden_PD, head.head_VD, chunk.asked, only_count)
    return sums.asked_B.cpu(), sums.correct_B.cpu()


def _batch(drafter: Drafter, texts: Sequence[DecodedText]) -> Batch:
    """The texts laid out as training lays them out; only decoding's anchors have weight."""
    rows: list[tuple[Tensor, Tensor]] = []
    anchors: list[int] = []
    counted: list[bool] = []
    start = 0
    for text in texts:
        tokens_T = torch.tensor(text.tokens)
        rows.append((tokens_T, torch.arange(len(tokens_T)) >= len(text.prompt)))
        drafted = {anchor for anchor, _ in text.drafts}
        anchors += [start + anchor for anchor in text.anchors]
        counted += [anchor in drafted for anchor in text.anchors]
        start += len(tokens_T)
    tokens_T, mask_T, lengths, document_T, position_T = pack(rows)
    blocks = make_blocks(
        tokens_T,
        mask_T,
        document_T,
        torch.tensor(anchors),
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        gamma=1.0,  # the slots are only counted
    )
    weights_NB = blocks.weights_NB * torch.tensor(counted)[:, None]
    blocks = replace(blocks, weights_NB=weights_NB)
    return Batch(0, 0, tokens_T, lengths, document_T, position_T, blocks)


def _served(texts: Sequence[DecodedText]) -> tuple[Tensor, Tensor]:
    """Per slot, how many of decoding's drafts were right, and right with all before them, [B]."""
    size = 1 + max(len(draft) for text in texts for _, draft in text.drafts)
    right_B, accepted_B = torch.zeros(2, size, dtype=torch.long)
    for text in texts:
        for anchor, draft in text.drafts:
            truth = text.tokens[anchor + 1 :]
            same = torch.tensor([a == b for a, b in zip(draft, truth, strict=False)]).long()
            right_B[1 : 1 + len(same)] += same
            accepted_B[1 : 1 + len(same)] += same.cumprod(0)
    return right_B, accepted_B
