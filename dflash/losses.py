"""The objective of a micro-batch, as sums that add up over micro-batches and replicas.

    loss = [sum w (CE + kl_weight T^2 KL)] / sum w  +  cap_lambda * CAP
    CAP  = [sum w 1(argmax q = label) H(q)] / [sum w 1(argmax q = label)]   (LLaDA2.0, 5.2)

w: slot weights; CE against the label; KL(p_T || q_T) against the target's distribution at the
preceding position, both softened by temperature T; H: entropy of the drafter's distribution q.
P draft slots, V vocabulary, D hidden size, T context tokens, B slots in a block.

The lm_head is frozen, so the gradient of the logits is known in closed form: CE q - onehot;
T^2 KL: T (q_T - p_T); entropy: -q (log q + H). It is taken to the hidden states chunk by chunk and
no logits are kept.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

# Logits held at once, in elements: 64 MiB in float32 for each of the few copies a chunk makes.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Objective:
    """Weights of the loss's parts. Soft labels are on when a Teacher is given."""

    kl_weight: float
    kl_temperature: float
    cap_lambda: float


@dataclass(frozen=True)
class Teacher:
    """Where the soft labels come from: hidden_TD through the head at row_P, one row per slot.

    Each row is turned into a distribution once, however many slots ask for it (and once more where
    a chunk of slots ends among them).
    """

    hidden_TD: Tensor
    row_P: Tensor


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

    def __add__(self, other: "LossSums") -> "LossSums":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return LossSums(*[mine + theirs.to(mine.device) for mine, theirs in pairs])


def block_losses(
    hidden_PD: Tensor,
    head_VD: Tensor,
    labels_NB: Tensor,
    weights_NB: Tensor,
    objective: Objective,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor, LossSums]:
    """Loss sums of a micro-batch.

    Returns:
        main: sum w (CE + kl_weight T^2 KL); differentiable with respect to hidden_PD.
        cap: sum w 1(correct) H; differentiable with respect to hidden_PD.
        sums: the parts, without gradient.
    """
    labels_P, weights_P = labels_NB.flatten(), weights_NB.flatten()
    main, cap, parts_P5, correct_P = _HeadLoss.apply(
        hidden_PD, head_VD, labels_P, weights_P, objective, teacher
    )
    return main, cap, _sums(parts_P5, correct_P.view_as(labels_NB), weights_NB > 0)


def _sums(parts_P5: Tensor, correct_NB: Tensor, asked_NB: Tensor) -> LossSums:
    scalars = parts_P5.double().sum(0).unbind()
    # Slot 0 is the anchor: it is never asked and never breaks a prefix.
    anchor_N1 = torch.ones_like(correct_NB[:, :1])
    prefix_NB = torch.cat([anchor_N1, correct_NB[:, 1:]], dim=1).cumprod(1)
    prefix_NB = prefix_NB.bool() & asked_NB
    slots = [asked_NB.sum(0), correct_NB.sum(0), prefix_NB.sum(0)]
    return LossSums(*scalars, *slots)


class _HeadLoss(torch.autograd.Function):
    """Frozen lm_head and loss in one: the gradient is made on the way forward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        head_VD: Tensor,
        labels_P: Tensor,
        weights_P: Tensor,
        objective: Objective,
        teacher: Teacher | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        main_grad_PD = torch.zeros_like(hidden_PD)
        cap_grad_PD = torch.zeros_like(hidden_PD) if objective.cap_lambda else None
        parts_P5 = hidden_PD.new_zeros(len(hidden_PD), 5, dtype=_accurate(hidden_PD.dtype))
        correct_P = torch.zeros_like(labels_P, dtype=torch.bool)
        for rows in _chunks(weights_P, teacher, head_VD.shape[0]):
            chunk = _Chunk.of(hidden_PD[rows], head_VD, labels_P[rows], weights_P[rows])
            grad_CV = chunk.ce_gradient()
            kl_C = entropy_C = torch.zeros_like(chunk.ce_C)
            if teacher is not None:
                kl_C, kl_grad_CV = chunk.kl(
                    teacher, teacher.row_P[rows], head_VD, objective.kl_temperature
                )
                grad_CV += objective.kl_weight * kl_grad_CV
            main_grad_PD[rows] = chunk.to_hidden(grad_CV, head_VD).to(hidden_PD.dtype)
            if cap_grad_PD is not None:
                entropy_C, cap_grad_CV = chunk.cap()
                cap_grad_PD[rows] = chunk.to_hidden(cap_grad_CV, head_VD).to(hidden_PD.dtype)
            parts_P5[rows] = chunk.parts(kl_C, entropy_C)
            correct_P[rows] = chunk.correct_C
        ctx.save_for_backward(main_grad_PD, cap_grad_PD)
        ctx.mark_non_differentiable(parts_P5, correct_P)
        _, _, ce_P, kl_P, entropy_P = parts_P5.unbind(1)
        main = ce_P.sum() + objective.kl_weight * kl_P.sum()
        return main, entropy_P.sum(), parts_P5, correct_P

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> tuple[Tensor | None, ...]:
        d_main, d_cap, *_ = d_outputs
        main_grad_PD, cap_grad_PD = ctx.saved_tensors
        grad_PD = d_main.to(main_grad_PD.dtype) * main_grad_PD
        if cap_grad_PD is not None:
            grad_PD = grad_PD + d_cap.to(cap_grad_PD.dtype) * cap_grad_PD
        return grad_PD, None, None, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """C slots of weight > 0: their log-probabilities and what follows from them."""

    log_q_CV: Tensor
    labels_C: Tensor
    weights_C: Tensor
    ce_C: Tensor
    correct_C: Tensor

    @classmethod
    def of(
        cls, hidden_CD: Tensor, head_VD: Tensor, labels_C: Tensor, weights_C: Tensor
    ) -> "_Chunk":
        log_q_CV = _logits(hidden_CD, head_VD).log_softmax(-1)
        ce_C = -log_q_CV.gather(1, labels_C[:, None])[:, 0]
        correct_C = log_q_CV.argmax(-1) == labels_C
        return cls(log_q_CV, labels_C, weights_C.to(log_q_CV.dtype), ce_C, correct_C)

    def ce_gradient(self) -> Tensor:
        grad_CV = self.log_q_CV.exp()
        minus_one = torch.full_like(grad_CV[:, :1], -1.0)
        return grad_CV.scatter_add_(1, self.labels_C[:, None], minus_one)

    def kl(
        self, teacher: Teacher, row_C: Tensor, head_VD: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """T^2 KL of each slot and its gradient with respect to the logits."""
        unique_U, inverse_C = row_C.unique_consecutive(return_inverse=True)
        teacher_UV = _logits(teacher.hidden_TD[unique_U], head_VD)
        log_p_CV = (teacher_UV / temperature).log_softmax(-1)[inverse_C]
        # log q differs from the logits by a constant of the row, which softmax ignores.
        log_q_CV = (self.log_q_CV / temperature).log_softmax(-1)
        p_CV = log_p_CV.exp()
        kl_C = (p_CV * (log_p_CV - log_q_CV)).sum(-1)
        return temperature**2 * kl_C, temperature * (log_q_CV.exp() - p_CV)

    def cap(self) -> tuple[Tensor, Tensor]:
        """Entropy of each slot, 0 where it is wrong, and its gradient (argmax is a constant)."""
        q_CV = self.log_q_CV.exp()
        entropy_C = -(q_CV * self.log_q_CV).sum(-1)
        grad_CV = -q_CV * (self.log_q_CV + entropy_C[:, None])
        return entropy_C * self.correct_C, grad_CV * self.correct_C[:, None]

    def to_hidden(self, grad_CV: Tensor, head_VD: Tensor) -> Tensor:
        return (self.weights_C[:, None] * grad_CV).to(head_VD.dtype) @ head_VD

    def parts(self, kl_C: Tensor, entropy_C: Tensor) -> Tensor:
        per_slot = (torch.ones_like(kl_C), self.correct_C, self.ce_C, kl_C, entropy_C)
        return self.weights_C[:, None] * torch.stack(per_slot, dim=1)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden_CD: Tensor, head_VD: Tensor) -> Tensor:
    return (hidden_CD.to(head_VD.dtype) @ head_VD.T).to(_accurate(head_VD.dtype))


def _chunks(weights_P: Tensor, teacher: Teacher | None, vocab_size: int) -> tuple[Tensor, ...]:
    """Slots that count, in chunks; in order of their teacher's row, so that each is made once."""
    rows = weights_P.nonzero().flatten()
    if teacher is not None:
        rows = rows[teacher.row_P[rows].argsort(stable=True)]
    return rows.split(max(1, CHUNK_ELEMENTS // vocab_size))
