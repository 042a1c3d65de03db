"""`losses.chunk_losses` as one kernel for CUDA: each row of logits is read twice, and that is all.

torch.compile makes several loops over a row of it, with soft labels and CAP up to seven, where two
are enough: one for all sums, and one for the gradients that need them. Sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash.losses import Objective

BLOCK, WARPS = 4096, 8


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
):
    """One row: z its logits, t the teacher's, q and p what they make of them."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    own = tl.load(logits + label).to(tl.float32)
    cold = 1.0 / temperature
    if SOFT:
        teachers += tl.load(ranks + row) * vocabulary

    # All sums are of exp(z - top), or of exp((t - top_t) / T), and grow with the top seen so far.
    top = float("-inf")
    sum_q = tl.zeros([BLOCK], tl.float32)
    sum_qz = tl.zeros([BLOCK], tl.float32)
    sum_soft = tl.zeros([BLOCK], tl.float32)
    top_t = float("-inf")
    sum_p = tl.zeros([BLOCK], tl.float32)
    sum_pt = tl.zeros([BLOCK], tl.float32)
    sum_pz = tl.zeros([BLOCK], tl.float32)
    beaten = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < vocabulary
        z = tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
        loses = (z < own) | ((z == own) & (token >= label))
        beaten = tl.where(loses | (token >= vocabulary), beaten, 1)
        new_top = tl.maximum(top, tl.max(z, 0))
        q = tl.exp(z - new_top)
        sum_q = sum_q * tl.exp(top - new_top) + q
        finite_z = tl.where(is_token, z, 0.0)
        if CAP:
            sum_qz = sum_qz * tl.exp(top - new_top) + q * finite_z
        if SOFT:
            sum_soft = sum_soft * tl.exp((top - new_top) * cold) + tl.exp((z - new_top) * cold)
            t = tl.load(teachers + token, mask=is_token, other=float("-inf")).to(tl.float32)
            new_top_t = tl.maximum(top_t, tl.max(t, 0))
            shrunk = tl.exp((top_t - new_top_t) * cold)
            p = tl.exp((t - new_top_t) * cold)
            sum_p = sum_p * shrunk + p
            sum_pt = sum_pt * shrunk + p * tl.where(is_token, t, 0.0)
            sum_pz = sum_pz * shrunk + p * finite_z
            top_t = new_top_t
        top = new_top

    total_q = tl.sum(sum_q, 0)
    norm = top + tl.log(total_q)
    ce = norm - own
    kl = 0.0
    entropy = 0.0
    norm_soft = 0.0
    norm_t = 0.0
    if SOFT:
        total_p = tl.sum(sum_p, 0)
        norm_soft = top * cold + tl.log(tl.sum(sum_soft, 0))
        norm_t = top_t * cold + tl.log(total_p)
        difference = (tl.sum(sum_pt, 0) - tl.sum(sum_pz, 0)) / total_p * cold
        kl = temperature * temperature * (difference - norm_t + norm_soft)
    if CAP:
        entropy = norm - tl.sum(sum_qz, 0) / total_q
    tl.store(parts + 3 * row, ce)
    tl.store(parts + 3 * row + 1, kl)
    tl.store(parts + 3 * row + 2, entropy)
    tl.store(corrects + row, tl.max(beaten, 0) == 0)

    slope_of_label = _expm1(-ce)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        is_token = token < vocabulary
        z = tl.load(logits + token, mask=is_token, other=0.0).to(tl.float32)
        q = tl.exp(z - norm)
        slope = tl.where(token == label, slope_of_label, q)
        if SOFT:
            t = tl.load(teachers + token, mask=is_token, other=0.0).to(tl.float32)
            soft = tl.exp(z * cold - norm_soft) - tl.exp(t * cold - norm_t)
            slope += kl_weight * temperature * soft
        if CAP:
            cap = -q * (z - norm + entropy)
            tl.store(caps + row * vocabulary + token, cap, mask=is_token)
        tl.store(logits + token, slope, mask=is_token)


@triton.jit
def _expm1(x):
    """exp(x) - 1, also where x is almost 0."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5))))
    return tl.where(x > -0.05, series, tl.exp(x) - 1)
