"""The objective: by hand, against plain autograd in float64, and as sums that add up."""

import math
from dataclasses import fields

import pytest
import torch

from dflash import losses
from dflash.losses import LossSums, Objective, Teacher, block_losses

BLOCK, VOCAB, HIDDEN = 4, 11, 6
FULL = Objective(kl_weight=0.3, kl_temperature=2.0, cap_lambda=0.5)
CHUNKS = [1, 2 * VOCAB, 5 * VOCAB, 1 << 24]


def random_case(seed=0, blocks=6):
    """(hidden, head, labels, weights, teacher) in float64; some labels are right, some unasked."""
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
    row_P = torch.randint(9, (blocks * BLOCK,), generator=random)
    teacher = Teacher(torch.randn(9, HIDDEN, generator=random).double(), row_P)
    return hidden_PD, head_VD, labels_NB, weights_NB, teacher


def plain(hidden_PD, head_VD, labels_NB, weights_NB, objective, teacher):
    """(main, cap) written down from the formulas, for autograd to differentiate."""
    labels_P, weights_P = labels_NB.flatten(), weights_NB.flatten()
    logits_PV = hidden_PD @ head_VD.T
    log_q_PV = logits_PV.log_softmax(-1)
    ce_P = -log_q_PV[torch.arange(len(labels_P)), labels_P]
    kl_P = torch.zeros_like(ce_P)
    if teacher is not None:
        T = objective.kl_temperature
        p_PV = (teacher.hidden_TD[teacher.row_P] @ head_VD.T / T).softmax(-1)
        kl_P = T**2 * (p_PV * (p_PV.log() - (logits_PV / T).log_softmax(-1))).sum(-1)
    right_P = (logits_PV.argmax(-1) == labels_P).double()
    entropy_P = -(log_q_PV.exp() * log_q_PV).sum(-1)
    main = (weights_P * (ce_P + objective.kl_weight * kl_P)).sum()
    return main, (weights_P * right_P * entropy_P).sum()


def gradients(main, cap, hidden_PD):
    by_main = torch.autograd.grad(main, hidden_PD, retain_graph=True)[0]
    return by_main, torch.autograd.grad(cap, hidden_PD)[0]


@pytest.mark.parametrize("chunk_elements", CHUNKS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_values_and_gradients_equal_plain_autograd(monkeypatch, chunk_elements, soft, temperature):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_elements)
    objective = Objective(kl_weight=0.3, kl_temperature=temperature, cap_lambda=0.5)
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case()
    hidden_PD.requires_grad_()
    args = (hidden_PD, head_VD, labels_NB, weights_NB, objective, teacher if soft else None)

    main, cap, sums = block_losses(*args)
    expected = plain(*args)
    torch.testing.assert_close((main, cap), expected)
    torch.testing.assert_close(
        gradients(main, cap, hidden_PD), gradients(*expected, hidden_PD), rtol=1e-10, atol=1e-12
    )
    assert (sums.ce + objective.kl_weight * sums.kl).item() == pytest.approx(expected[0].item())
    assert sums.entropy.item() == pytest.approx(expected[1].item())
    assert (sums.kl > 0) == soft


def test_both_parts_differentiate_in_one_backward_with_any_scale():
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case()
    hidden_PD.requires_grad_()
    args = (hidden_PD, head_VD, labels_NB, weights_NB, FULL, teacher)
    main, cap, _ = block_losses(*args)
    (got,) = torch.autograd.grad(3.0 * main - 0.25 * cap, hidden_PD)
    main, cap = plain(*args)
    (expected,) = torch.autograd.grad(3.0 * main - 0.25 * cap, hidden_PD)
    torch.testing.assert_close(got, expected)


def test_losses_by_hand():
    # Two tokens; logits (ln 3, 0) and (0, ln 3): q = (3/4, 1/4) and (1/4, 3/4).
    head_VD = torch.eye(2)
    ln3 = math.log(3)
    hidden_PD = torch.tensor([[9.0, 9.0], [ln3, 0.0], [0.0, ln3]], requires_grad=True)
    labels_NB, weights_NB = torch.tensor([[0, 0, 0]]), torch.tensor([[0.0, 1.0, 0.5]])
    # The teacher says (1/2, 1/2) of slot 1 and (1/4, 3/4), as the drafter does, of slot 2.
    teacher = Teacher(torch.tensor([[0.0, 0.0], [0.0, ln3]]), torch.tensor([0, 0, 1]))
    objective = Objective(kl_weight=0.1, kl_temperature=1.0, cap_lambda=1.0)
    main, cap, sums = block_losses(hidden_PD, head_VD, labels_NB, weights_NB, objective, teacher)

    ce = 1.0 * math.log(4 / 3) + 0.5 * math.log(4)
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)  # slot 1 alone is right
    assert main.item() == pytest.approx(ce + 0.1 * kl)
    assert cap.item() == pytest.approx(entropy)
    scalars = [sums.weight, sums.correct_weight, sums.ce, sums.kl, sums.entropy]
    assert [s.item() for s in scalars] == pytest.approx([1.5, 1.0, ce, kl, entropy])
    slots = [sums.asked_B, sums.correct_B, sums.prefix_B]
    assert [s.tolist() for s in slots] == [[0, 1, 1], [0, 1, 0], [0, 1, 0]]

    # CE: w (q - onehot); KL: 0.1 (q - p).
    (gradient,) = torch.autograd.grad(main, hidden_PD)
    expected = [[0, 0], [-0.25 + 0.1 * 0.25, 0.25 - 0.1 * 0.25], [-0.375, 0.375]]
    torch.testing.assert_close(gradient, torch.tensor(expected))


def test_a_prefix_ends_at_its_first_mistake_and_at_what_is_not_asked():
    head_VD = torch.eye(2)
    right, wrong = [1.0, 0.0], [0.0, 1.0]
    hidden_PD = torch.tensor([wrong, right, wrong, right, wrong, right, right, right])
    labels_NB = torch.zeros(2, 4, dtype=torch.long)
    weights_NB = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    *_, sums = block_losses(hidden_PD, head_VD, labels_NB, weights_NB, Objective(0, 1, 0))
    assert sums.asked_B.tolist() == [0, 2, 2, 1]
    assert sums.correct_B.tolist() == [0, 2, 1, 1]
    assert sums.prefix_B.tolist() == [0, 2, 1, 0]


def test_slots_of_weight_0_count_for_nothing():
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case()
    unasked_NB = weights_NB == 0
    garbage_PD = torch.where(unasked_NB.flatten()[:, None], torch.nan, hidden_PD).requires_grad_()
    other_NB = torch.where(unasked_NB, (labels_NB + 1) % VOCAB, labels_NB)

    main, cap, sums = block_losses(garbage_PD, head_VD, other_NB, weights_NB, FULL, teacher)
    expected = block_losses(hidden_PD, head_VD, labels_NB, weights_NB, FULL, teacher)
    assert (main, cap) == expected[:2]
    for field in fields(LossSums):
        assert getattr(sums, field.name).equal(getattr(expected[2], field.name))
    (gradient_PD,) = torch.autograd.grad(main + cap, garbage_PD)
    assert gradient_PD[unasked_NB.flatten()].abs().max() == 0
    assert gradient_PD[~unasked_NB.flatten()].abs().sum(1).min() > 0


def test_two_micro_batches_of_n_blocks_add_up_to_one_of_2n():
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case(blocks=6)

    def of(blocks):
        slots = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        part = Teacher(teacher.hidden_TD, teacher.row_P[slots])
        return block_losses(
            hidden_PD[slots], head_VD, labels_NB[blocks], weights_NB[blocks], FULL, part
        )

    (*whole, sums), (*first, a), (*second, b) = of(slice(0, 6)), of(slice(0, 3)), of(slice(3, 6))
    torch.testing.assert_close(torch.stack(whole), torch.stack(first) + torch.stack(second))
    added = LossSums.zero(BLOCK, torch.device("cpu")) + a + b
    for field in fields(LossSums):
        torch.testing.assert_close(getattr(added, field.name), getattr(sums, field.name))


def teacher_rows_made(monkeypatch, chunk_elements):
    """(rows made into distributions, rows asked for) with teacher rows that can be told apart."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_elements)
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case()
    rows = len(teacher.hidden_TD)
    teacher.hidden_TD[:, 0] = torch.arange(1000, 1000 + rows)
    made, original = [], losses._logits

    def spy(hidden_CD, head_VD):
        first = hidden_CD[:, 0]
        made.extend((first[first >= 1000] - 1000).long().tolist())
        return original(hidden_CD, head_VD)

    monkeypatch.setattr(losses, "_logits", spy)
    block_losses(hidden_PD, head_VD, labels_NB, weights_NB, FULL, teacher)
    return made, set(teacher.row_P[weights_NB.flatten() > 0].tolist())


def test_a_teacher_row_is_made_once_however_many_slots_ask(monkeypatch):
    made, asked = teacher_rows_made(monkeypatch, 1 << 24)
    assert sorted(made) == sorted(asked)


def test_a_teacher_row_is_made_again_only_where_a_chunk_ends_in_it(monkeypatch):
    slots, chunk = 18, 4
    made, asked = teacher_rows_made(monkeypatch, chunk * VOCAB)
    assert made == sorted(made)
    assert len(asked) <= len(made) <= len(asked) + slots // chunk


def test_bfloat16_inputs_are_summed_in_float32():
    hidden_PD, head_VD, labels_NB, weights_NB, teacher = random_case()
    half = [t.bfloat16() for t in (hidden_PD, head_VD, teacher.hidden_TD)]
    hidden = half[0].requires_grad_()
    soft = Teacher(half[2], teacher.row_P)
    main, _, _ = block_losses(hidden, half[1], labels_NB, weights_NB.float(), FULL, soft)
    exact = Teacher(half[2].double(), teacher.row_P)
    expected, _ = plain(half[0].double(), half[1].double(), labels_NB, weights_NB, FULL, exact)
    assert main.dtype == torch.float32
    assert main.item() == pytest.approx(expected.item(), rel=0.02)
    assert torch.autograd.grad(main, hidden)[0].dtype == torch.bfloat16


def test_no_slots_sum_to_nothing():
    none = torch.zeros(0, BLOCK)
    main, cap, sums = block_losses(
        torch.zeros(0, HIDDEN), torch.ones(VOCAB, HIDDEN), none.long(), none, FULL
    )
    assert (main, cap, sums.weight, sums.asked_B.sum()) == (0, 0, 0, 0)
