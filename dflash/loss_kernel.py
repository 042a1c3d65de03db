"""`losses.chunk_losses` as one kernel for CUDA: each row of logits is read twice, and that is all.

torch.compile makes several loops over a row of it, with soft labels and CAP up to seven, where two
are enough: one for all sums, and one for the gradients that need them. Sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.losses import Objective

BLOCK = 2048
WARPS = 16
LOG2_E = tl.constexpr(1.4426950408889634)
OUTSIDE = tl.constexpr(-1e30)
"""A logit beside the vocabulary: finite, for it is multiplied by its probability, 0."""
LOWEST = tl.constexpr(-5e29)
"""A top before any logit. Above OUTSIDE: where a warp's share lies beside a small vocabulary, their
difference in a fused multiply-add would be that product's rounding, of which exp2 is infinite.
"""


def chunk_losses(
    logits_CV: Tensor,
    label_C: Tensor,
    teacher_UV: Tensor | None,
    rank_C: Tensor,
    objective: Objective,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See `losses.chunk_losses`; the logits are overwritten by their gradient."""
    count, vocabulary = logits_CV.shape
    parts_C3 = torch.empty(count, 3, device=logits_CV.device)
    correct_C = torch.empty(count, dtype=torch.bool, device=logits_CV.device)
    cap_CV = torch.empty_like(logits_CV) if objective.cap_lambda else None
    _rows[(count,)](
        logits_CV,
        label_C,
        teacher_UV,
        rank_C,
        parts_C3,
        correct_C,
        cap_CV,
        vocabulary,
        objective.kl_weight,
        objective.kl_temperature,
        SOFT=teacher_UV is not None,
        CAP=cap_CV is not None,
        BLOCK=BLOCK,
        WARPS=WARPS,
        num_warps=WARPS,
    )
    return logits_CV, cap_CV, parts_C3, correct_C


@triton.jit
def _rows(
    logits,
    labels,
    teachers,
    ranks,
    parts,
    corrects,
    caps,
    vocabulary,
    kl_weight,
    temperature,
    SOFT: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
):
    """One row: z its logits, t the teacher's, q and p what they make of them.

    Exponents have base 2, as the hardware has: exp(z - top) is exp2(z * LOG2_E - top * LOG2_E).
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    own = tl.load(logits + label).to(tl.float32)
    cold = LOG2_E / temperature
    own_t = 0.0
    if SOFT:
        teachers += tl.load(ranks + row) * vocabulary
        own_t = tl.load(teachers + label).to(tl.float32)

    top, top_t, total_q, total_qz, total_soft, total_p, total_pt, total_pz = _sums(
        logits, teachers, vocabulary, cold, SOFT, CAP, BLOCK, WARPS
    )
    norm = top + tl.log(total_q)
    ce = tl.log(total_q) - (own - top)  # of a sure drafter: own is top, and nothing is rounded off
    kl = 0.0
    entropy = 0.0
    norm_soft = 0.0
    norm_t = 0.0
    if SOFT:
        norm_soft = top * cold + tl.log2(total_soft)
        norm_t = top_t * cold + tl.log2(total_p)
        difference = (total_pt - total_pz) / total_p * cold
        kl = temperature * temperature * (difference - norm_t + norm_soft) / LOG2_E
    if CAP:
        entropy = norm - total_qz / total_q

    pull = kl_weight * temperature
    if CAP:
        caps += row * vocabulary
    is_first = _write_gradients(
        logits,
        teachers,
        caps,
        vocabulary,
        label,
        own,
        norm,
        entropy,
        cold,
        norm_soft,
        norm_t,
        pull,
        SOFT,
        CAP,
        BLOCK,
    )

    of_label = _expm1(-ce)
    if SOFT:
        soft = tl.exp2(own * cold - norm_soft) - tl.exp2(own_t * cold - norm_t)
        of_label += pull * soft
    tl.debug_barrier()  # the label's place has been written, with the others
    tl.store(logits + label, of_label)
    tl.store(parts + 3 * row, ce)
    tl.store(parts + 3 * row + 1, kl)
    tl.store(parts + 3 * row + 2, entropy)
    # Of equal logits the first is the drafter's token.
    tl.store(corrects + row, (own >= top) & is_first)


@triton.jit
def _sums(
    logits,
    teachers,
    vocabulary,
    cold,
    SOFT: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The tops of z and t, and sums over the row: of q, q z, q at the temperature, p, p t and p z.

    Each warp has tops of its own, so that none waits for another within the loop. The sums are
    relative to the tops seen so far, and shrink when these grow.
    """
    LANES: tl.constexpr = BLOCK // WARPS
    top = tl.full([WARPS], LOWEST, tl.float32)
    top_t = tl.full([WARPS], LOWEST, tl.float32)
    sum_q = tl.zeros([WARPS, LANES], tl.float32)
    sum_qz = tl.zeros([WARPS, LANES], tl.float32)
    sum_soft = tl.zeros([WARPS, LANES], tl.float32)
    sum_p = tl.zeros([WARPS, LANES], tl.float32)
    sum_pt = tl.zeros([WARPS, LANES], tl.float32)
    sum_pz = tl.zeros([WARPS, LANES], tl.float32)
    offset = tl.arange(0, WARPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for start in range(0, vocabulary, BLOCK):
        token = start + offset
        is_token = token < vocabulary
        z = tl.load(logits + token, mask=is_token, other=OUTSIDE).to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, 1))
        shrink = tl.exp2((top - new_top) * LOG2_E)[:, None]
        q = tl.exp2(z * LOG2_E - (new_top * LOG2_E)[:, None])
        sum_q = sum_q * shrink + q
        if CAP:
            sum_qz = sum_qz * shrink + q * z
        if SOFT:
            shrink_soft = tl.exp2((top - new_top) * cold)[:, None]
            sum_soft = sum_soft * shrink_soft + tl.exp2(z * cold - (new_top * cold)[:, None])
            t = tl.load(teachers + token, mask=is_token, other=OUTSIDE).to(tl.float32)
            new_top_t = tl.maximum(top_t, tl.max(t, 1))
            shrink_t = tl.exp2((top_t - new_top_t) * cold)[:, None]
            p = tl.exp2(t * cold - (new_top_t * cold)[:, None])
            sum_p = sum_p * shrink_t + p
            sum_pt = sum_pt * shrink_t + p * t
            sum_pz = sum_pz * shrink_t + p * z
            top_t = new_top_t
        top = new_top
    whole_top = tl.max(top, 0)
    whole_top_t = tl.max(top_t, 0)
    shrink = tl.exp2((top - whole_top) * LOG2_E)
    shrink_soft = tl.exp2((top - whole_top) * cold)
    shrink_t = tl.exp2((top_t - whole_top_t) * cold)
    return (
        whole_top,
        whole_top_t,
        tl.sum(tl.sum(sum_q, 1) * shrink, 0),
        tl.sum(tl.sum(sum_qz, 1) * shrink, 0),
        tl.sum(tl.sum(sum_soft, 1) * shrink_soft, 0),
        tl.sum(tl.sum(sum_p, 1) * shrink_t, 0),
        tl.sum(tl.sum(sum_pt, 1) * shrink_t, 0),
        tl.sum(tl.sum(sum_pz, 1) * shrink_t, 0),
    )


@triton.jit
def _write_gradients(
    logits,
    teachers,
    caps,
    vocabulary,
    label,
    own,
    norm,
    entropy,
    cold,
    norm_soft,
    norm_t,
    pull,
    SOFT: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the row's gradients in place, the label's as if it were none.

    Returns whether no token before the label has the same logit.
    """
    ties = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < vocabulary
        z = tl.load(logits + token, mask=is_token, other=OUTSIDE).to(tl.float32)
        ties = tl.where((z == own) & (token < label), 1, ties)
        q = tl.exp2(z * LOG2_E - norm * LOG2_E)
        slope = q
        if SOFT:
            t = tl.load(teachers + token, mask=is_token, other=OUTSIDE).to(tl.float32)
            soft = tl.exp2(z * cold - norm_soft) - tl.exp2(t * cold - norm_t)
            slope += pull * soft
        if CAP:
            cap = -q * (z - norm + entropy)
            tl.store(caps + token, cap, mask=is_token)
        tl.store(logits + token, slope, mask=is_token)
    return tl.max(ties, 0) == 0


@triton.jit
def _expm1(x):
    """exp(x) - 1, also where x is almost 0."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.05, series, tl.exp(x) - 1)
