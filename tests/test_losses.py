"""The objective: by hand, against plain autograd in float64, and as sums that add up."""

import math
from dataclasses import fields, replace

import pytest
import torch

from dflash import losses
from dflash.anchors import Blocks
from dflash.asked import AskedSlots
from dflash.losses import LossSums, Objective, block_losses
from dflash.streams import HostCopy

BLOCK, VOCAB, HIDDEN = 4, 11, 6
FULL = Objective(kl_weight=0.3, kl_temperature=2.0, cap_lambda=0.5)
CHUNKS = [1, 2, 5, 1000]  # slots


def random_case(seed=0, blocks=6):
    """(hidden, head, blocks, teacher) in float64; some labels are right, some slots unasked."""
    random = torch.Generator().manual_seed(seed)
    hidden_PD = torch.randn(blocks * BLOCK, HIDDEN, generator=random).double()
    head_VD = torch.randn(VOCAB, HIDDEN, generator=random).double()
    best_NB = (hidden_PD @ head_VD.T).argmax(-1).view(blocks, BLOCK)
    labels_NB = torch.randint(VOCAB, (blocks, BLOCK), generator=random)
    right_NB = torch.rand(blocks, BLOCK, generator=random) < 0.5
    labels_NB = torch.where(right_NB, best_NB, labels_NB)
    weights_NB = torch.rand(blocks, BLOCK, generator=random)
    weights_NB[torch.rand(blocks, BLOCK, generator=random) < 0.2] = 0.0
    weights_NB[:, 0] = 0.0
    anchor_N = torch.randint(6, (blocks,), generator=random).sort().values
    teacher_TD = torch.randn(9, HIDDEN, generator=random).double()
    return hidden_PD, head_VD, made(labels_NB, weights_NB, anchor_N), teacher_TD


def made(labels_NB, weights_NB, anchor_N=None):
    """Blocks with these labels and weights."""
    anchor_N = torch.arange(len(labels_NB)) if anchor_N is None else anchor_N
    return Blocks(anchor_N, torch.zeros_like(labels_NB), labels_NB, weights_NB)


def losses_of(hidden_PD, head_VD, blocks, objective, teacher_TD=None, **options):
    return block_losses(hidden_PD, head_VD, AskedSlots.of(blocks), objective, teacher_TD, **options)


def plain(hidden_PD, head_VD, blocks, objective, teacher_TD):
    """(main, cap) written down from the formulas, for autograd to differentiate."""
    labels_P, weights_P = blocks.labels_NB.flatten(), blocks.weights_NB.flatten()
    logits_PV = hidden_PD @ head_VD.T
    log_q_PV = logits_PV.log_softmax(-1)
    ce_P = -log_q_PV[torch.arange(len(labels_P)), labels_P]
    kl_P = torch.zeros_like(ce_P)
    if teacher_TD is not None:
        T = objective.kl_temperature
        row_P = (blocks.anchor_N[:, None] + torch.arange(BLOCK) - 1).flatten().clamp(min=0)
        p_PV = (teacher_TD[row_P] @ head_VD.T / T).softmax(-1)
        kl_P = T**2 * (p_PV * (p_PV.log() - (logits_PV / T).log_softmax(-1))).sum(-1)
    right_P = (logits_PV.argmax(-1) == labels_P).double()
    entropy_P = -(log_q_PV.exp() * log_q_PV).sum(-1)
    main = (weights_P * (ce_P + objective.kl_weight * kl_P)).sum()
    return main, (weights_P * right_P * entropy_P).sum()


def exact(hidden_PD, *case):
    """The sums and their gradients with respect to hidden_PD, by autograd in float64."""
    hidden_PD = hidden_PD.double().requires_grad_()
    main, cap = plain(hidden_PD, *case)
    (main_PD,) = torch.autograd.grad(main, hidden_PD, retain_graph=True)
    return main.item(), cap.item(), main_PD, torch.autograd.grad(cap, hidden_PD)[0]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_equal_plain_autograd(monkeypatch, chunk, soft, temperature):
    monkeypatch.setattr(losses, "EAGER_CHUNK_BYTES", chunk * VOCAB * 8)
    monkeypatch.setattr(losses, "ROWS", 1)
    objective = Objective(kl_weight=0.3, kl_temperature=temperature, cap_lambda=0.5)
    hidden_PD, head_VD, blocks, teacher_TD = random_case()
    args = (hidden_PD, head_VD, blocks, objective, teacher_TD if soft else None)

    main_PD, cap_PD, sums = losses_of(*args)
    main, cap, exact_main_PD, exact_cap_PD = exact(*args)
    torch.testing.assert_close(main_PD, exact_main_PD, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cap_PD, exact_cap_PD, rtol=1e-10, atol=1e-12)
    assert (sums.ce + objective.kl_weight * sums.kl).item() == pytest.approx(main)
    assert sums.entropy.item() == pytest.approx(cap)
    assert (sums.kl > 0) == soft


def test_without_cap_there_is_no_gradient_of_it():
    _, cap_PD, sums = losses_of(*random_case()[:3], Objective(0.0, 1.0, 0.0))
    assert (cap_PD, sums.entropy) == (None, 0)


@pytest.mark.parametrize(
    ("asked", "most", "sizes"),
    [(18, 7, [6, 6, 6]), (14, 5, [4, 4, 4, 2]), (3, 1, [2, 1]), (5, 9, [5]), (0, 9, [])],
)
def test_chunks_are_as_equal_as_whole_tiles_allow(monkeypatch, asked, most, sizes):
    monkeypatch.setattr(losses, "ROWS", 2)
    weights_NB = torch.zeros(6, BLOCK)
    weights_NB[:, 1:] = (torch.arange(6 * (BLOCK - 1)).view(6, -1) < asked).float()
    slots = AskedSlots.of(made(torch.zeros(6, BLOCK, dtype=torch.long), weights_NB))
    assert [len(chunk.slot_C) for chunk in losses._chunks(slots, most)] == sizes


def test_losses_by_hand():
    # Two tokens; logits (ln 3, 0) and (0, ln 3): q = (3/4, 1/4) and (1/4, 3/4).
    head_VD = torch.eye(2)
    ln3 = math.log(3)
    hidden_PD = torch.tensor([[9.0, 9.0], [ln3, 0.0], [0.0, ln3]])
    labels_NB, weights_NB = torch.tensor([[0, 0, 0]]), torch.tensor([[0.0, 1.0, 0.5]])
    # The teacher says (1/2, 1/2) of slot 1 and (1/4, 3/4), as the drafter does, of slot 2.
    teacher_TD = torch.tensor([[0.0, 0.0], [0.0, ln3]])
    objective = Objective(kl_weight=0.1, kl_temperature=1.0, cap_lambda=1.0)
    blocks = made(labels_NB, weights_NB)
    main_PD, _, sums = losses_of(hidden_PD, head_VD, blocks, objective, teacher_TD)

    ce = 1.0 * math.log(4 / 3) + 0.5 * math.log(4)
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)  # slot 1 alone is right
    scalars = [sums.weight, sums.correct_weight, sums.ce, sums.kl, sums.entropy]
    assert [s.item() for s in scalars] == pytest.approx([1.5, 1.0, ce, kl, entropy])
    slots = [sums.asked_B, sums.correct_B, sums.prefix_B]
    assert [s.tolist() for s in slots] == [[0, 1, 1], [0, 1, 0], [0, 1, 0]]

    # CE: w (q - onehot); KL: 0.1 (q - p).
    expected = [[0, 0], [-0.25 + 0.1 * 0.25, 0.25 - 0.1 * 0.25], [-0.375, 0.375]]
    torch.testing.assert_close(main_PD, torch.tensor(expected))


def test_a_prefix_ends_at_its_first_mistake_and_at_what_is_not_asked():
    head_VD = torch.eye(2)
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    hidden_PD = torch.tensor([wrong, right, wrong, right, wrong, right, right, right])
    labels_NB = torch.zeros(2, 4, dtype=torch.long)
    weights_NB = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    *_, sums = losses_of(hidden_PD, head_VD, made(labels_NB, weights_NB), Objective(0, 1, 0))
    assert sums.asked_B.tolist() == [0, 2, 2, 1]
    assert sums.correct_B.tolist() == [0, 2, 1, 1]
    assert sums.prefix_B.tolist() == [0, 2, 1, 0]


def test_slots_of_weight_0_count_for_nothing():
    hidden_PD, head_VD, blocks, teacher_TD = random_case()
    unasked_NB = blocks.weights_NB == 0
    garbage_PD = torch.where(unasked_NB.flatten()[:, None], torch.nan, hidden_PD)
    other_NB = torch.where(unasked_NB, (blocks.labels_NB + 1) % VOCAB, blocks.labels_NB)
    other = replace(blocks, labels_NB=other_NB)

    *got, sums = losses_of(garbage_PD, head_VD, other, FULL, teacher_TD)
    *expected, same = losses_of(hidden_PD, head_VD, blocks, FULL, teacher_TD)
    for field in fields(LossSums):
        assert getattr(sums, field.name).equal(getattr(same, field.name))
    assert all(mine.equal(theirs) for mine, theirs in zip(got, expected, strict=True))
    assert got[0][unasked_NB.flatten()].abs().max() == 0
    assert got[0][~unasked_NB.flatten()].abs().sum(1).min() > 0


def test_two_micro_batches_of_n_blocks_add_up_to_one_of_2n():
    hidden_PD, head_VD, blocks, teacher_TD = random_case(blocks=6)

    def of(which):
        slots = slice(which.start * BLOCK, which.stop * BLOCK)
        return losses_of(hidden_PD[slots], head_VD, blocks.part(which), FULL, teacher_TD)

    (*whole, sums), (*first, a), (*second, b) = of(slice(0, 6)), of(slice(0, 3)), of(slice(3, 6))
    for together, *parts in zip(whole, first, second, strict=True):
        torch.testing.assert_close(together, torch.cat(parts))
    added = LossSums.zero(BLOCK, torch.device("cpu")) + a + b
    for field in fields(LossSums):
        torch.testing.assert_close(getattr(added, field.name), getattr(sums, field.name))


def test_sums_are_the_same_after_the_way_to_the_host():
    *_, sums = losses_of(*random_case()[:3], FULL)
    host = LossSums.of_flat(HostCopy(sums.flat()).wait())
    for field in fields(LossSums):
        mine, theirs = getattr(sums, field.name), getattr(host, field.name)
        assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())


def teacher_rows_made(monkeypatch, chunk):
    """(rows made into logits, rows asked for), of a chunk of so many slots."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk * VOCAB * 8)
    monkeypatch.setattr(losses, "ROWS", 1)
    hidden_PD, head_VD, blocks, teacher_TD = random_case()
    teacher_TV = teacher_TD @ head_VD.T
    rows_made = []

    def spy(logits_CV, label_C, teacher_UV, rank_C, objective):
        rows_made.extend(torch.cdist(teacher_UV, teacher_TV).argmin(-1).tolist())
        return losses.chunk_losses(logits_CV, label_C, teacher_UV, rank_C, objective)

    losses_of(hidden_PD, head_VD, blocks, FULL, teacher_TD, losses=spy)
    row_NB = blocks.anchor_N[:, None] + torch.arange(BLOCK) - 1
    return rows_made, set(row_NB[blocks.weights_NB > 0].tolist())


def test_a_teacher_row_is_made_once_however_many_slots_ask(monkeypatch):
    rows_made, asked = teacher_rows_made(monkeypatch, 1000)
    assert rows_made == sorted(asked)


def test_a_teacher_row_is_made_again_only_where_a_chunk_ends_in_it(monkeypatch):
    slots, chunk = 18, 4
    rows_made, asked = teacher_rows_made(monkeypatch, chunk)
    assert rows_made == sorted(rows_made)
    assert len(asked) <= len(rows_made) <= len(asked) + slots // chunk


def test_bfloat16_inputs_are_summed_in_float32():
    hidden_PD, head_VD, blocks, teacher_TD = random_case()
    half = [t.bfloat16() for t in (hidden_PD, head_VD, teacher_TD)]
    main_PD, cap_PD, sums = losses_of(half[0], half[1], blocks, FULL, half[2])
    expected, _ = plain(half[0].double(), half[1].double(), blocks, FULL, half[2].double())
    assert (sums.ce + FULL.kl_weight * sums.kl).item() == pytest.approx(expected.item(), rel=0.02)
    assert (main_PD.dtype, cap_PD.dtype) == (torch.bfloat16, torch.bfloat16)


def test_no_slots_sum_to_nothing():
    none = torch.zeros(0, BLOCK)
    main_PD, _, sums = losses_of(
        torch.zeros(0, HIDDEN), torch.ones(VOCAB, HIDDEN), made(none.long(), none), FULL
    )
    assert main_PD.shape == (0, HIDDEN)
    assert (sums.weight, sums.ce, sums.asked_B.sum()) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_of_equal_logits_the_first_is_the_drafters_token(dtype):
    """As in greedy decoding: bfloat16 logits are often equal."""
    random = torch.Generator().manual_seed(0)
    logits_CV = torch.randint(0, 3, (200, 8), generator=random).to(dtype)
    label_C = torch.randint(0, 8, (200,), generator=random)
    *_, correct_C = losses.chunk_losses(logits_CV, label_C, None, label_C, FULL)
    assert 20 < correct_C.sum() < 180
    assert torch.equal(correct_C, logits_CV.argmax(-1) == label_C)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("cap_lambda", [0.0, 0.5])
@pytest.mark.parametrize("vocabulary", [5000, 4999, 300])
def test_the_kernel_is_the_same_in_float64(dtype, soft, cap_lambda, vocabulary):
    """On logits that are given: what is left is the rounding of float32 sums, and of the result."""
    from dflash import loss_kernel

    random = torch.Generator().manual_seed(0)
    logits_CV = (4 * torch.randn(300, vocabulary, generator=random)).to(dtype)
    label_C = logits_CV.argmax(-1)
    label_C[::3] = torch.randint(0, vocabulary, (100,), generator=random)
    logits_CV[1, label_C[1]] = 25.0  # rather sure: the label's slope is almost 0
    logits_CV[4, :2] = logits_CV[4].max()  # equal logits, of which the first counts
    label_C[4] = 1
    teacher_UV = (4 * torch.randn(40, vocabulary, generator=random)).to(dtype) if soft else None
    rank_C = torch.randint(0, 40, (300,), generator=random)
    objective = replace(FULL, cap_lambda=cap_lambda)
    exact_teacher_UV = teacher_UV.double() if soft else None
    *expected, correct_C = losses.chunk_losses(
        logits_CV.double(), label_C, exact_teacher_UV, rank_C, objective
    )
    cuda = [None if x is None else x.cuda() for x in (logits_CV, label_C, teacher_UV, rank_C)]
    *got, correct = loss_kernel.chunk_losses(*cuda, objective)
    assert torch.equal(correct.cpu(), correct_C)
    tolerances = [5e-3 if dtype == torch.bfloat16 else 1e-5] * 2 + [1e-5]
    for mine, theirs, tolerance in zip(got, expected, tolerances, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.cpu().double() - theirs).norm() < tolerance * theirs.norm()
    if not soft:
        label = label_C[1]
        assert got[0][1, label].item() == pytest.approx(expected[0][1, label].item(), rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("soft", [False, True])
def test_on_the_gpu_they_equal_plain_autograd_in_float64(monkeypatch, soft):
    """Several chunks; bfloat16 logits are the error that is left."""
    from dflash import loss_kernel

    monkeypatch.setattr(losses, "CHUNK_BYTES", 256 * 5000 * 2)
    random = torch.Generator().manual_seed(0)
    hidden_PD = torch.randn(150 * BLOCK, 64, generator=random).bfloat16()
    head_VD = (torch.randn(5000, 64, generator=random) / 4).bfloat16()
    best_P2 = (hidden_PD.double() @ head_VD.double().T).topk(2)
    clear_P = best_P2.values.diff().abs()[:, 0] > 0.5  # as rounded logits would decide, too
    best_P = torch.where(clear_P, best_P2.indices[:, 0], 17)
    labels_NB = torch.where(
        torch.rand(150, BLOCK, generator=random) < 0.5, best_P.view(150, BLOCK), 17
    )
    weights_NB = torch.rand(150, BLOCK, generator=random)
    weights_NB[:, 0] = 0.0
    blocks = made(labels_NB, weights_NB)
    teacher_TD = torch.randn(160, 64, generator=random).bfloat16()
    *got, sums = block_losses(
        hidden_PD.cuda(),
        head_VD.cuda(),
        AskedSlots.of(blocks).to(torch.device("cuda")),
        FULL,
        teacher_TD.cuda() if soft else None,
        loss_kernel.chunk_losses,
    )
    soft_labels = teacher_TD.double() if soft else None
    main, cap, *expected = exact(hidden_PD, head_VD.double(), blocks, FULL, soft_labels)
    assert (sums.ce + FULL.kl_weight * sums.kl).item() == pytest.approx(main, rel=1e-2)
    assert sums.entropy.item() == pytest.approx(cap, rel=1e-2)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.cpu().double() - theirs).norm() < 2e-2 * theirs.norm()
