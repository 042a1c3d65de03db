"""The schedule, and a step whose result does not depend on how it was cut."""

import copy
import math

import pytest
import torch
from torch import nn

from dflash.anchors import Blocks
from dflash.asked import AskedSlots
from dflash.gradients import Gradients, GradientSums, backward
from dflash.losses import LossSums, Objective, block_losses
from dflash.optim import NonFiniteError, Schedule, apply_step, make_optimizer
from dflash.sections import OptimizerConfig

CPU = torch.device("cpu")
BLOCK, VOCAB, HIDDEN, BLOCKS = 3, 7, 5, 8
FULL = Objective(kl_weight=0.3, kl_temperature=2.0, cap_lambda=0.5)


def test_warm_up_then_cosine():
    schedule = Schedule(peak_lr=1.0, warmup_ratio=0.2, total_steps=10)
    expected = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8))]
    assert [schedule.lr(step) for step in range(10)] == pytest.approx(expected)
    assert schedule.lr(10) == pytest.approx(0.0)


def test_a_part_of_a_step_of_warm_up_is_a_step_of_it():
    assert Schedule(1.0, 0.04, 30).lr(0) == 0.5
    assert Schedule(1.0, 0.04, 30).lr(1) == 1.0


def test_no_warm_up_starts_at_the_peak():
    assert Schedule(3.0, 0.0, 4).lr(0) == 3.0


def test_a_single_step_is_taken_at_the_peak():
    assert Schedule(3.0, 0.04, 1).lr(0) == 3.0


@pytest.fixture
def case():
    """(model, blocks -> hidden states and block_losses of them): a linear 'drafter' in float64."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random).double()

    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(draw(*parameter.shape))
    inputs_PD, head_VD, teacher_TD = draw(BLOCKS * BLOCK, HIDDEN), draw(VOCAB, HIDDEN), draw(9, 5)
    best_NB = (model(inputs_PD) @ head_VD.T).argmax(-1).view(BLOCKS, BLOCK)
    labels_NB = torch.randint(VOCAB, (BLOCKS, BLOCK), generator=random)
    labels_NB[::2] = best_NB[::2]
    # Blocks weigh differently, so that a mean of means would not be the mean.
    weights_NB = torch.rand(BLOCKS, BLOCK, generator=random).double()
    weights_NB *= torch.arange(1, BLOCKS + 1)[:, None]
    weights_NB[:, 0] = 0.0
    anchor_N = torch.randint(7, (BLOCKS,), generator=random).sort().values
    blocks_all = Blocks(anchor_N, torch.zeros_like(labels_NB), labels_NB, weights_NB)
    row_P = (anchor_N[:, None] + torch.arange(BLOCK) - 1).clamp(min=0).flatten()

    def losses(blocks):
        slots = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        asked = AskedSlots.of(blocks_all.part(blocks))
        hidden_PD = model(inputs_PD[slots])
        return hidden_PD, *block_losses(hidden_PD.detach(), head_VD, asked, FULL, teacher_TD)

    def plain():
        """The normalised loss over all blocks, from its formula."""
        logits_PV = model(inputs_PD) @ head_VD.T
        log_q_PV = logits_PV.log_softmax(-1)
        labels_P, weights_P = labels_NB.flatten(), weights_NB.flatten()
        p_PV = (teacher_TD[row_P] @ head_VD.T / 2).softmax(-1)
        kl_P = 4 * (p_PV * (p_PV.log() - (logits_PV / 2).log_softmax(-1))).sum(-1)
        ce_P = -log_q_PV.gather(1, labels_P[:, None])[:, 0]
        right_P = weights_P * (logits_PV.argmax(-1) == labels_P)
        entropy_P = -(log_q_PV.exp() * log_q_PV).sum(-1)
        main = (weights_P * (ce_P + 0.3 * kl_P)).sum() / weights_P.sum()
        return main + 0.5 * (right_P * entropy_P).sum() / right_P.sum()

    return model, losses, plain


@pytest.mark.parametrize(
    ("replicas", "grad_accum"), [(1, 1), (1, 4), (2, 2), (4, 1), (1, 8), (8, 1)]
)
def test_the_gradient_does_not_depend_on_how_the_step_was_cut(case, replicas, grad_accum):
    model, losses, plain = case
    size = BLOCKS // (replicas * grad_accum)
    parts, sums = [], LossSums.zero(BLOCK, CPU)
    for rank in range(replicas):
        part = GradientSums(list(model.parameters()), with_cap=True, shared=True)
        for i in range(grad_accum):
            start = (rank * grad_accum + i) * size
            hidden_PD, main_PD, cap_PD, of_batch = losses(slice(start, start + size))
            part.add(backward(hidden_PD, [main_PD, cap_PD], list(model.parameters())))
            sums += of_batch
        parts.append(part.finish())
    together, weight = Gradients.total(parts, CPU).combined(sums, FULL.cap_lambda)
    got = [gradient / weight for gradient in together]

    expected = torch.autograd.grad(plain(), list(model.parameters()))
    torch.testing.assert_close(got, list(expected), rtol=1e-10, atol=1e-13)


def halves(*values):
    return [None if value is None else torch.full((2,), value).bfloat16() for value in values]


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_forgets_the_one_before_also_where_nothing_arrives(shared):
    sums = GradientSums([torch.ones(2), torch.ones(2)], with_cap=False, shared=shared)
    seen = []
    for step in ([(1.0, 2.0), (4.0, None)], [(None, 5.0), (None, None)], []):
        sums.start()
        for reached in step:
            sums.add([halves(*reached)])
        seen.append([total[0].item() for total in sums.finish().main])
    assert seen == [[5.0, 2.0], [0.0, 5.0], [0.0, 0.0]]


def test_a_single_gradient_is_kept_as_it_came_and_several_add_up_in_float32():
    sums = GradientSums([torch.ones(2), torch.ones(2)], with_cap=False, shared=False)
    single, first = given = halves(1.0, 256.0)
    sums.add([given])
    sums.add([halves(None, 1.0)])  # in bfloat16 256 + 1 is 256
    main = sums.finish().main
    assert main[0] is single
    assert (main[1].dtype, main[1].tolist()) == (torch.float32, [257.0, 257.0])
    assert first.tolist() == [256.0, 256.0]


def test_what_will_be_overwritten_is_copied_first():
    sums = GradientSums([torch.ones(2), torch.ones(2)], with_cap=False, shared=False)
    static, other = halves(1.0, None), halves(None, 3.0)
    for value in (1.0, 2.0):  # as two replays of one graph
        sums.before_overwriting()
        static[0].fill_(value)
        sums.add([static])
    sums.add([other])
    main = sums.finish().main
    assert main[0].tolist() == [3.0, 3.0]
    assert main[1] is other[1]


def test_without_a_correct_slot_cap_is_left_out():
    gradients = Gradients([torch.ones(2)], [torch.zeros(2)])
    sums = LossSums.zero(BLOCK, CPU)
    sums.weight.fill_(4.0)
    (gradient,), weight = gradients.combined(sums, 0.5)
    assert (gradient.tolist(), weight) == ([1.0, 1.0], 4.0)


def test_the_total_leaves_the_replicas_gradients_alone():
    parts = [Gradients([torch.full((2,), float(i))], None) for i in (1, 2, 4)]
    assert Gradients.total(parts, CPU).main[0].tolist() == [7.0, 7.0]
    assert [part.main[0].tolist() for part in parts] == [[1.0] * 2, [2.0] * 2, [4.0] * 2]
    assert Gradients.total(parts, CPU).cap is None


def test_weight_decay_falls_on_matrices_only():
    model = nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.5))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.5, 0.0, 0.0]

    model[0].weight.data.fill_(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    apply_step(model, optimizer, zeros, lr=0.1, clip=1.0, step=0)
    after = list(model.parameters())
    torch.testing.assert_close(after[0], 0.95 * before[0])
    assert after[1].equal(before[1]) and after[2].equal(before[2])


def test_a_step_equals_adamw_written_down():
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, -2.0]])
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, lr=1.0))
    norm = apply_step(model, optimizer, [torch.tensor([[3.0, 4.0]])], lr=0.01, clip=1.0, step=0)
    # The first step of Adam is the gradient's sign; decay pulls by lr x 0.1.
    assert norm == pytest.approx(5.0)
    assert model.weight.tolist()[0] == pytest.approx([1.0 - 0.001 - 0.01, -2.0 + 0.002 - 0.01])
    assert model.weight.grad is None
    moment = optimizer.state[model.weight]["exp_avg"]
    assert moment.tolist()[0] == pytest.approx([0.1 * 0.6, 0.1 * 0.8])  # clipped to norm 1


def test_the_divisor_comes_before_the_clip():
    model = nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(model, OptimizerConfig())
    sums = [torch.tensor([[30.0, 40.0]])]
    norm = apply_step(model, optimizer, sums, divisor=10.0, lr=0.1, clip=2.5, step=0)
    assert norm == pytest.approx(5.0)
    moment = optimizer.state[model.weight]["exp_avg"]
    torch.testing.assert_close(moment, torch.tensor([[0.15, 0.2]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("clip", "scale"), [(0.0, 1.0), (2.5, 0.5), (10.0, 1.0)])
def test_the_gradient_is_clipped_to_the_norm_and_0_is_no_clipping(clip, scale):
    model = nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(model, OptimizerConfig())
    gradient = torch.tensor([[3.0, 4.0]])
    assert apply_step(model, optimizer, [gradient], lr=0.1, clip=clip, step=0) == pytest.approx(5)
    moment = optimizer.state[model.weight]["exp_avg"]
    torch.testing.assert_close(moment, 0.1 * scale * torch.tensor([[3.0, 4.0]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, clip, device):
    model = nn.Linear(2, 2).to(device)
    optimizer = make_optimizer(model, OptimizerConfig())
    good = [torch.ones_like(p) for p in model.parameters()]
    apply_step(model, optimizer, good, lr=0.1, clip=clip, step=0)
    before = [p.detach().clone() for p in model.parameters()]
    copies = [p.detach().bfloat16() for p in model.parameters()]
    copied = [weight.clone() for weight in copies]
    states = copy.deepcopy([optimizer.state[p] for p in model.parameters()])

    worse = [torch.ones_like(p) for p in model.parameters()]
    worse[1][0] = bad
    with pytest.raises(NonFiniteError, match=r"step 8: the gradient's norm is (nan|inf)") as caught:
        apply_step(model, optimizer, worse, lr=0.1, clip=clip, step=7, copies=copies)
    assert "--resume" in caught.value.remedy
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(now.equal(b) for now, b in zip(copies, copied, strict=True))
    for p, state in zip(model.parameters(), states, strict=True):
        assert all(optimizer.state[p][name].equal(value) for name, value in state.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_copies", [True, False])
def test_the_kernel_steps_as_adamw_does_in_float64(dtype, with_copies):
    """Sizes of whole blocks and not; the copies are the weights, rounded."""
    random = torch.Generator().manual_seed(0)
    shapes, config = [(64, 48), (33, 41), (4096,), (7,)], OptimizerConfig(weight_decay=0.1)
    model = nn.ParameterList([torch.randn(shape, generator=random) for shape in shapes])
    exact = nn.ParameterList([weight.detach().double() for weight in model])
    reference = make_optimizer(exact, config)
    model = model.cuda()
    optimizer = make_optimizer(model, config)
    copies = [weight.detach().bfloat16() for weight in model] if with_copies else None
    for step in range(5):
        gradients = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
        given = {"divisor": 3.0, "lr": 0.01, "clip": 5.0, "step": step}
        on_gpu = [gradient.cuda() for gradient in gradients]
        apply_step(model, optimizer, on_gpu, copies=copies, **given)
        apply_step(exact, reference, [gradient.double() for gradient in gradients], **given)
    for mine, theirs in zip(model, exact, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-5, atol=1e-6)
        moments, expected = optimizer.state[mine], reference.state[theirs]
        assert moments["step"] == expected["step"] == 5
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                moments[name].cpu().double(), expected[name], rtol=1e-5, atol=1e-8
            )
    for mine, weight in zip(copies or [], model, strict=with_copies):
        assert torch.equal(mine, weight.bfloat16())
