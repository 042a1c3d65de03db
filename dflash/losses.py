"""The objective of a micro-batch, as sums that add up over micro-batches and replicas.

    loss = [sum w (CE + kl_weight T^2 KL)] / sum w  +  cap_lambda * CAP
    CAP  = [sum w 1(argmax q = label) H(q)] / [sum w 1(argmax q = label)]   (LLaDA2.0, 5.2)

w: slot weights; CE against the label; KL(p_T || q_T) against the target's distribution at the
preceding position, both softened by temperature T; H: entropy of the drafter's distribution q.
P draft slots, S of them asked (see dflash.asked), C of these in a chunk, U different rows of the
target that teach them; V vocabulary, D hidden size, T context tokens, B slots in a block.

The lm_head is frozen, so the gradient of the logits is known in closed form: CE q - onehot;
T^2 KL: T (q_T - p_T); entropy: -q (log q + H). It is taken to the hidden states chunk by chunk,
without autograd, and no logits are kept. How large a chunk is, and what is in it, is known on the
host.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dflash.asked import AskedSlots

CHUNK_BYTES = 1 << 29
"""Logits of a chunk, at most. There are as many again of the target's, and of CAP's gradient."""
EAGER_CHUNK_BYTES = 1 << 26
"""The same where every operation makes a copy."""
ROWS = 128
"""Chunks hold a multiple of so many slots: tiles of a matrix product."""


@dataclass(frozen=True)
class Objective:
    """Weights of the loss's parts. Soft labels are on when the teacher's rows are given."""

    kl_weight: float
    kl_temperature: float
    cap_lambda: float


@dataclass(frozen=True)
class LossSums:
    """Unnormalised sums over the slots of weight > 0; they add up over micro-batches.

    Attributes:
        weight: sum w. correct_weight: sum w over correctly predicted slots.
        ce, kl, entropy: sum w CE, sum w T^2 KL, sum of w H over correct slots (0 without CAP).
        asked_B, correct_B, prefix_B: per slot, how many were asked, were right, and were right
            together with every slot before them.
    """

    weight: Tensor
    correct_weight: Tensor
    ce: Tensor
    kl: Tensor
    entropy: Tensor
    asked_B: Tensor
    correct_B: Tensor
    prefix_B: Tensor

    @classmethod
    def zero(cls, block_size: int, device: torch.device) -> "LossSums":
        """The sums of nothing."""
        scalars = torch.zeros(5, dtype=torch.float64, device=device).unbind()
        slots = torch.zeros(3, block_size, dtype=torch.long, device=device).unbind()
        return cls(*scalars, *slots)

    @classmethod
    def of(cls, parts_S5: Tensor, correct_S: Tensor, asked: AskedSlots) -> "LossSums":
        """Sums of the asked slots' parts: weight, correct weight, w CE, w T^2 KL, w H."""
        asked_P = correct_S.new_zeros(asked.shape[0] * asked.shape[1])
        correct_P = asked_P.index_copy(0, asked.slot_S, correct_S)
        asked_NB = asked_P.index_fill_(0, asked.slot_S, True).view(asked.shape)
        correct_NB = correct_P.view(asked.shape)
        # Slot 0 is the anchor: it is never asked and never breaks a prefix.
        anchor_N1 = torch.ones_like(correct_NB[:, :1])
        prefix_NB = torch.cat([anchor_N1, correct_NB[:, 1:]], dim=1).cumprod(1)
        prefix_NB = prefix_NB.bool() & asked_NB
        slots = [asked_NB.sum(0), correct_NB.sum(0), prefix_NB.sum(0)]
        return cls(*parts_S5.double().sum(0).unbind(), *slots)

    def flat(self) -> Tensor:
        """All in one vector, [5 + 3 B] float64, to be copied at once."""
        scalars = (self.weight, self.correct_weight, self.ce, self.kl, self.entropy)
        slots_3B = torch.stack((self.asked_B, self.correct_B, self.prefix_B))
        return torch.cat([torch.stack(scalars), slots_3B.flatten()])

    @classmethod
    def of_flat(cls, flat: Tensor) -> "LossSums":
        """The sums that `flat` has put into this vector."""
        return cls(*flat[:5].unbind(), *flat[5:].view(3, -1).long().unbind())

    def __add__(self, other: "LossSums") -> "LossSums":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return LossSums(*[mine + theirs.to(mine.device) for mine, theirs in pairs])


def block_losses(
    hidden_PD: Tensor,
    head_VD: Tensor,
    asked: AskedSlots,
    objective: Objective,
    teacher_TD: Tensor | None = None,
    losses: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor | None, LossSums]:
    """Loss sums of a micro-batch and their gradients with respect to hidden_PD.

    Args:
        teacher_TD: the target's last hidden states, from which the head makes the soft labels.
        losses: `loss_kernel.chunk_losses`; as written, `chunk_losses` below.

    Returns:
        main_PD: gradient of sum w (CE + kl_weight T^2 KL).
        cap_PD: gradient of sum w 1(correct) H; None without CAP.
        sums: the parts.
    """
    main_PD = torch.zeros_like(hidden_PD)
    cap_PD = torch.zeros_like(hidden_PD) if objective.cap_lambda else None
    parts_S3 = _accurate(hidden_PD.new_empty(len(asked), 3))
    correct_S = torch.empty_like(asked.slot_S, dtype=torch.bool)
    row_bytes = len(head_VD) * head_VD.element_size()
    for chunk in _chunks(asked, (CHUNK_BYTES if losses else EAGER_CHUNK_BYTES) // row_bytes):
        main_CD, cap_CD, parts_C3, correct_C = _of_chunk(
            hidden_PD, head_VD, chunk, objective, teacher_TD, losses or chunk_losses
        )
        chunk.put(main_PD, main_CD, chunk.weight_C)
        if cap_PD is not None:
            assert cap_CD is not None
            # Which slots are right is taken as a constant.
            chunk.put(cap_PD, cap_CD, chunk.weight_C * correct_C)
        parts_S3[chunk.part] = parts_C3
        correct_S[chunk.part] = correct_C
    weight_S = asked.weight_S.to(parts_S3.dtype)
    correct_weight_S = weight_S * correct_S
    ce_S, kl_S, entropy_S = parts_S3.unbind(1)
    parts = (
        weight_S,
        correct_weight_S,
        weight_S * ce_S,
        weight_S * kl_S,
        correct_weight_S * entropy_S,
    )
    return main_PD, cap_PD, LossSums.of(torch.stack(parts, dim=1), correct_S, asked)


def _of_chunk(
    hidden_PD: Tensor,
    head_VD: Tensor,
    chunk: "_Chunk",
    objective: Objective,
    teacher_TD: Tensor | None,
    losses: Callable[..., Any],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Unweighted gradients, losses and hits of a chunk; its logits are gone when this returns."""
    logits_CV = hidden_PD[chunk.slot_C].to(head_VD.dtype) @ head_VD.T
    teacher_UV = None
    if teacher_TD is not None:
        teacher_UV = teacher_TD[chunk.row_U].to(head_VD.dtype) @ head_VD.T
    slope_CV, cap_CV, parts_C3, correct_C = losses(
        logits_CV, chunk.label_C, teacher_UV, chunk.rank_C, objective
    )
    cap_CD = None if cap_CV is None else cap_CV @ head_VD
    return slope_CV @ head_VD, cap_CD, parts_C3, correct_C


def chunk_losses(
    logits_CV: Tensor,
    label_C: Tensor,
    teacher_UV: Tensor | None,
    rank_C: Tensor,
    objective: Objective,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The losses of each slot of a chunk and their gradients with respect to its logits.

    Args:
        teacher_UV: the target's logits; slot c learns from row rank_C[c].

    Returns:
        The gradients of CE + kl_weight T^2 KL and of the entropy (None without CAP), [C, V], in
        the logits' dtype; CE, T^2 KL and the entropy, [C, 3]; which slots are right, [C].
    """
    dtype = logits_CV.dtype
    logits_CV = _accurate(logits_CV)
    token_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    log_q_CV = logits_CV.log_softmax(-1)
    q_CV = log_q_CV.exp()
    ce_C = -log_q_CV.gather(1, label_C[:, None])[:, 0]
    kl_C = entropy_C = torch.zeros_like(ce_C)
    # expm1: q - 1 of the label itself, exact where q is almost 1.
    slope_CV = torch.where(token_V == label_C[:, None], torch.expm1(-ce_C)[:, None], q_CV)
    if teacher_UV is not None:
        temperature = objective.kl_temperature
        norm_U = (_accurate(teacher_UV) / temperature).logsumexp(-1)
        log_p_CV = _accurate(teacher_UV[rank_C]) / temperature - norm_U[rank_C][:, None]
        log_q_soft_CV = (logits_CV / temperature).log_softmax(-1)
        p_CV = log_p_CV.exp()
        kl_C = temperature**2 * (p_CV * (log_p_CV - log_q_soft_CV)).sum(-1)
        slope_CV = slope_CV + objective.kl_weight * temperature * (log_q_soft_CV.exp() - p_CV)
    cap_CV = None
    if objective.cap_lambda:
        entropy_C = -(q_CV * log_q_CV).sum(-1)
        cap_CV = (-q_CV * (log_q_CV + entropy_C[:, None])).to(dtype)
    parts_C3 = torch.stack((ce_C, kl_C, entropy_C), dim=1)
    return slope_CV.to(dtype), cap_CV, parts_C3, logits_CV.argmax(-1) == label_C


@dataclass(frozen=True)
class _Chunk:
    """Asked slots whose logits are made together, and the target's rows that teach them."""

    part: slice
    slot_C: Tensor
    label_C: Tensor
    weight_C: Tensor
    row_U: Tensor
    rank_C: Tensor

    @classmethod
    def of(cls, asked: AskedSlots, part: slice) -> "_Chunk":
        slot_C, label_C, weight_C = (
            each_S[part] for each_S in (asked.slot_S, asked.label_S, asked.weight_S)
        )
        rows = asked.rows(part)
        rank_C = asked.rank_S[part] - rows.start
        return cls(part, slot_C, label_C, weight_C, asked.row_U[rows], rank_C)

    def put(self, into_PD: Tensor, gradient_CD: Tensor, weight_C: Tensor) -> None:
        """Weigh the gradients of these slots, and put them where they belong."""
        weighed_CD = (gradient_CD * weight_C[:, None]).to(into_PD.dtype)
        into_PD.index_copy_(0, self.slot_C, weighed_CD)


def _chunks(asked: AskedSlots, most: int) -> Iterator[_Chunk]:
    """At most `most` slots each, or one tile, in order: so a teacher's row is made once, or twice
    where a chunk ends.
    """
    tiles = math.ceil(len(asked) / ROWS)
    chunks = max(1, math.ceil(tiles / max(1, most // ROWS)))
    size = max(1, math.ceil(tiles / chunks)) * ROWS
    for start in range(0, len(asked), size):
        yield _Chunk.of(asked, slice(start, min(start + size, len(asked))))


def _accurate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
