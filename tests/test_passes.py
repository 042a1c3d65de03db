"""A drafter trained in the target's precision: a copy of its weights computes, float32 adds up."""

import pytest
import torch
from torch._inductor.utils import fresh_cache

from dflash.asked import AskedSlots
from dflash.batches import TargetFeatures
from dflash.drafter import autocast, build_drafter
from dflash.forward_backward import ForwardBackward
from dflash.losses import Objective, block_losses
from dflash.optim import apply_step, make_optimizer
from dflash.sections import OptimizerConfig
from dflash.shapes import ShapePolicy, Size
from dflash.target import FrozenHead

CPU, HALF = torch.device("cpu"), torch.bfloat16
CE = Objective(0.0, 1.0, 0.0)
SHAPES = ShapePolicy((Size(128, 32),), 4)


@pytest.fixture
def case(train_config, drafter_shape, make_batch):
    """(float32 drafter, its ForwardBackward in bfloat16, features)."""
    shape = drafter_shape(num_layers=2)
    random = torch.Generator().manual_seed(0)
    table_VD = torch.randn(shape.vocab_size, shape.hidden_size, generator=random).to(HALF)
    batch = make_batch([30, 9, 41], block_size=shape.block_size, vocab_size=shape.vocab_size)
    features_TF = torch.randn(len(batch.tokens_T), 2 * shape.hidden_size, generator=random)
    drafter = build_drafter(shape, seed=1, device=CPU)
    head = FrozenHead(table_VD, table_VD)
    config = train_config(objective={"cap-lambda": 0.0})
    run = ForwardBackward(drafter, head, config, HALF)
    return drafter, run, TargetFeatures(batch, features_TF.to(HALF), None)


def under_autocast(drafter, head, features):
    """The gradients of one micro-batch by autocast over the float32 weights."""
    batch, blocks = features.batch, features.batch.blocks
    with autocast(CPU, HALF):
        hidden_PD = drafter(
            head.embedding_VD[blocks.inputs_NB.flatten()],
            features.features_TF,
            batch.document_T,
            batch.position_T,
            blocks.anchor_N,
        )
    main_PD, _, _ = block_losses(hidden_PD.detach(), head.head_VD, AskedSlots.of(blocks), CE)
    return torch.autograd.grad(hidden_PD, list(drafter.parameters()), main_PD)


def after(run, features, times=1):
    """The gradients of a step of so many equal micro-batches, in float32."""
    run.start_step()
    for _ in range(times):
        run(features, 0.0)
    return [gradient.float() for gradient in run.finish_step().main]


def test_gradients_are_those_of_autocast_to_the_bit(case):
    drafter, run, features = case
    expected = under_autocast(drafter, run.head, features)
    torch.testing.assert_close(after(run, features), list(expected), rtol=0, atol=0)


def test_each_step_computes_with_the_weights_as_they_are_then(case):
    drafter, run, features = case
    before = [parameter.clone() for parameter in drafter.parameters()]
    ones = [torch.ones_like(parameter) for parameter in before]
    optimizer = make_optimizer(drafter, OptimizerConfig())
    apply_step(drafter, optimizer, ones, lr=0.1, clip=0.0, step=0, copies=run.copies)
    assert not any(map(torch.equal, drafter.parameters(), before))
    expected = under_autocast(drafter, run.head, features)
    torch.testing.assert_close(after(run, features), list(expected), rtol=0, atol=0)


def test_many_micro_batches_add_up_in_float32(case):
    """A bfloat16 sum of equal parts stands still after 256 of them."""
    _, run, features = case
    for first, total in zip(after(run, features), after(run, features, times=300), strict=True):
        torch.testing.assert_close(total, 300 * first, rtol=1e-3, atol=1e-5)


@pytest.fixture
def sometimes_right(train_config, drafter_shape, make_batch):
    """(make a compiled or eager run with so much CAP, features) over a vocabulary of 4."""
    shape = drafter_shape(num_layers=2, vocab_size=4, mask_token_id=3)
    random = torch.Generator().manual_seed(0)
    table_VD = torch.randn(4, shape.hidden_size, generator=random)
    batch = make_batch([30, 9, 41], block_size=shape.block_size, vocab_size=4)
    features_TF = torch.randn(len(batch.tokens_T), 2 * shape.hidden_size, generator=random)

    def make(cap_lambda, shapes=None):
        drafter = build_drafter(shape, seed=1, device=CPU)
        config = train_config(objective={"cap-lambda": cap_lambda})
        # An untrained drafter says what is put in, the mask token: read as a token that occurs.
        head = FrozenHead(table_VD, table_VD.roll(1, 0))
        return ForwardBackward(drafter, head, config, torch.float32, shapes, "inductor")

    return make, TargetFeatures(batch, features_TF, None)


def test_cap_is_right_where_a_run_without_it_has_filled_the_compile_cache(sometimes_right):
    """Two backwards over one forward, whose code may come from a run with a single one."""
    make, features = sometimes_right
    with (
        fresh_cache(),
        torch._functorch.config.patch(donated_buffer=True),  # put back afterwards
        torch.compiler.config.patch(cache_key_tag=""),
    ):
        make(0.0, SHAPES).warm_up(features, lambda _phase: None)
        torch._dynamo.reset()
        compiled = make(0.5, SHAPES)
        compiled.warm_up(features, lambda _phase: None)
        compiled.start_step()
        compiled(features, 0.0)
        got = compiled.finish_step()
    eager = make(0.5)
    eager.start_step()
    eager(features, 0.0)
    expected = eager.finish_step()
    assert min(gradient.norm() for gradient in expected.cap) > 0
    torch.testing.assert_close(got.main, expected.main, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.cap, expected.cap, rtol=1e-4, atol=1e-5)


def test_a_warm_up_leaves_no_sums_behind_that_no_step_needs(sometimes_right):
    """Of several micro-batches, each of one chunk."""
    make, features = sometimes_right
    run = make(0.0, ShapePolicy((Size(128, 64),), 4))
    run.warm_up(features, lambda _phase: None)
    (part,) = run.sums.parts
    assert part.now and not part.own
    run(features, 0.0)
    assert part.own
