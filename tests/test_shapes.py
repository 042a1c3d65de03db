"""Micro-batches at the sizes that are compiled for: which sizes, and that padding is nothing."""

import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash.attention import TILE
from dflash.batches import TargetFeatures
from dflash.forward_backward import ForwardBackward
from dflash.shapes import ShapeError, ShapePolicy, Size, cost, laid_out
from dflash.size_choice import choose_sizes
from dflash.streams import own_stream
from dflash.target import FrozenHead

CUDA = torch.device("cuda:0")


def policy(tokens, blocks, *, block_size=16, chunk_slots=16384):
    return choose_sizes(
        np.array(tokens), np.array(blocks), block_size=block_size, chunk_slots=chunk_slots
    )


def test_every_micro_batch_has_its_cheapest_size_of_whole_tiles():
    random = np.random.default_rng(0)
    tokens, blocks = random.integers(2, 50000, 500), random.integers(1, 900, 500)
    shapes = policy(tokens, blocks)
    assert 1 < len(shapes.sizes) <= 4
    assert all(size.context % TILE == 0 for size in shapes.sizes)
    for count, number in zip(tokens.tolist(), blocks.tolist(), strict=True):
        taken = shapes.size(count, number)
        fitting = [size for size in shapes.sizes if count < size.context]
        assert taken in fitting
        assert cost(taken, number, 16) == min(cost(size, number, 16) for size in fitting)


def test_equal_micro_batches_need_one_size():
    assert policy([300] * 9, [5] * 9).sizes == (Size(384, 8),)


def test_a_second_size_is_for_what_it_saves():
    """Where half of the micro-batches are small, and where one in a hundred is."""
    assert policy([100, 1000], [64, 1024]).sizes == (Size(128, 64), Size(1024, 1024))
    assert policy([100] + [1000] * 99, [64] + [1024] * 99).sizes == (Size(1024, 1024),)


def test_blocks_at_once_leave_little_padding_in_the_chunks():
    """Three chunks of 696 for 2080 blocks, and two of them, not two of 1040, for 1100."""
    shapes = policy([1000] * 3, [2080, 2080, 1100])
    assert shapes.sizes == (Size(1024, 696),)
    assert shapes.chunks == 3
    assert shapes.padding[0] == pytest.approx(1 - (2080 + 2080 + 1100) / (8 * 696))


@pytest.mark.parametrize(("tokens", "length"), [(383, 384), (384, 512)])
def test_there_is_room_for_the_paddings_anchor(tokens, length):
    assert policy([tokens], [5]).sizes[0].context == length


@pytest.mark.parametrize(
    ("most", "block_size", "chunk_slots", "blocks"),
    [
        (512, 16, 16384, 512),  # all at once
        (3, 16, 16384, 8),  # up to a whole tile
        (2048, 16, 16384, 1024),  # two chunks
        (1025, 16, 16384, 520),  # two chunks, and little padding
        (100, 10, 500, 64),  # whole blocks in whole tiles: 640 slots
    ],
)
def test_chunks_are_equal_and_of_whole_tiles(most, block_size, chunk_slots, blocks):
    shapes = policy([100], [most], block_size=block_size, chunk_slots=chunk_slots)
    (size,) = shapes.sizes
    assert size.blocks == blocks
    assert size.blocks * block_size % TILE == 0


def test_it_says_how_much_is_padding():
    assert str(policy([200, 255], [5, 8])) == (
        "256 tokens with 128 draft slots at once; padding is 19% of the slots, 11% of the cheaper "
        "tokens"
    )


def test_a_batch_that_was_not_foreseen_is_refused():
    with pytest.raises(ShapeError, match="a micro-batch of 400 tokens was not foreseen") as caught:
        policy([300], [5]).size(400, 5)
    assert "--compile none" in caught.value.remedy


@pytest.fixture
def case(train_config, drafter_shape, make_batch):
    """(make a ForwardBackward with sizes or without, features of a batch with soft labels)."""
    from dflash.drafter import build_drafter

    shape = drafter_shape(
        sliding_window=6, num_layers=3, head_dim=16
    )  # the least FlexAttention takes
    config = train_config(objective={"use-soft-labels": True, "cap-lambda": 0.3})
    random = torch.Generator().manual_seed(0)
    embedding_VD = torch.randn(shape.vocab_size, shape.hidden_size, generator=random)
    head = FrozenHead(embedding_VD, embedding_VD)
    batch = make_batch([30, 9, 41], block_size=shape.block_size, vocab_size=shape.vocab_size)
    tokens = len(batch.tokens_T)
    features = TargetFeatures(
        batch,
        torch.randn(tokens, 2 * shape.hidden_size, generator=random),
        torch.randn(tokens, shape.hidden_size, generator=random),
    )

    def make(shapes, backend="eager", device="cpu", graphs="off"):
        device = torch.device(device)
        drafter = build_drafter(shape, seed=1, device=device)
        on_device = head.to(device, torch.float32)
        devices = replace(config.devices, cuda_graphs=graphs)
        options = replace(config, devices=devices)
        return ForwardBackward(drafter, on_device, options, torch.float32, shapes, backend)

    return make, features


def sums_and_gradients(forward_backward, *micro_batches, device="cpu"):
    forward_backward.start_step()
    sums = forward_backward.no_sums()
    for features in micro_batches:
        sums += forward_backward(features.received(torch.device(device)), 0.1)
    gradients = forward_backward.finish_step()
    return [vars(sums), gradients.main, gradients.cap]


@pytest.mark.parametrize("blocks", [32, 64])
def test_padding_and_chunks_change_neither_losses_nor_gradients(case, blocks):
    make, features = case
    assert len(features.batch.blocks.anchor_N) % blocks
    shapes = ShapePolicy((Size(128, blocks),), 4)
    torch.testing.assert_close(
        sums_and_gradients(make(shapes), features), sums_and_gradients(make(None), features)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("blocks", [32, 96])
def test_compiled_on_the_gpu_they_change_neither(case, graphs, blocks):
    """FlexAttention and static sizes, in several chunks and in one, against the dense path.

    Two steps, as a replay reads new inputs, then one of two micro-batches, as it overwrites.
    """
    make, features = case
    assert 32 < len(features.batch.blocks.anchor_N) <= 96
    with own_stream(CUDA):
        compiled = make(ShapePolicy((Size(128, blocks),), 4), "inductor", "cuda", graphs)
        compiled.warm_up(features.received(CUDA), lambda _phase: None)
        assert (128 in compiled.graphed) == (graphs == "on")
        plain = make(None, device="cuda")
        halved = replace(features, features_TF=0.5 * features.features_TF)
        for step in ([features], [halved], [features, halved]):
            got = sums_and_gradients(compiled, *step, device="cuda")
            expected = sums_and_gradients(plain, *step, device="cuda")
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_replays_are_the_same_bits(case):
    """As of the very kernels that were captured: a second compile may choose others."""
    make, features = case
    with own_stream(CUDA):
        compiled = make(ShapePolicy((Size(128, 32),), 4), "inductor", "cuda", "on")
        compiled.warm_up(features.received(CUDA), lambda _phase: None)
        replayed = sums_and_gradients(compiled, features, device="cuda")
        replayed = [replayed[0], *([g.clone() for g in part] for part in replayed[1:])]
        compiled.graphed.clear()
        again = sums_and_gradients(compiled, features, device="cuda")
        torch.testing.assert_close(replayed, again, rtol=0, atol=0)


@pytest.mark.gpu
def test_without_a_gain_graphs_are_not_used(case, monkeypatch, caplog):
    """The size captured first gains nothing: the others are captured all the same."""
    caplog.set_level(logging.INFO)
    make, features = case
    with own_stream(CUDA):
        compiled = make(
            ShapePolicy((Size(128, 32), Size(256, 32), Size(384, 32)), 4),
            "inductor",
            "cuda",
            "auto",
        )
        seconds = iter([1.0, 1.0, 1.0, 0.5, 1.0, 1.0])
        monkeypatch.setattr(compiled, "_seconds", lambda *_example: next(seconds))
        compiled.warm_up(features.received(CUDA), lambda _phase: None)
    assert list(compiled.graphed) == [256]
    assert "1000.00 ms a micro-batch, without them 1000.00: not used" in caplog.text


def test_a_pool_whose_graphs_are_gone_is_not_captured_into(case, monkeypatch):
    """The allocator ends the process there: "use_count > 0 INTERNAL ASSERT FAILED"."""
    make, features = case
    run = make(ShapePolicy((Size(128, 32), Size(256, 32), Size(384, 32), Size(512, 32)), 4))
    seconds = iter([1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0])
    monkeypatch.setattr(run, "_seconds", lambda *_example: next(seconds))
    fresh, pools = itertools.count(1), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(fresh))

    def captured(_passes, _features_TF, _layout, pool):
        pools.append(pool)
        return SimpleNamespace(pool=pool)

    monkeypatch.setattr("dflash.forward_backward.GraphedPasses", captured)
    run.graphs = "auto"
    run._capture(run.shapes.sizes, features, lambda _phase: None)
    assert pools == [1, 2, 2, 2]
    assert list(run.graphed) == [384, 256]


@pytest.mark.parametrize("sizes", [ShapePolicy((Size(128, 32),), 4), None])
def test_a_layout_made_before_is_the_one_that_is_trained_on(case, sizes, monkeypatch):
    make, features = case
    run = make(sizes)
    expected = sums_and_gradients(run, features)
    before = replace(features, batch=laid_out(features.batch, sizes, pinned=False))
    monkeypatch.setattr(ShapePolicy, "layout", None)  # nobody makes another one
    torch.testing.assert_close(sums_and_gradients(run, before), expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_pinned_layout_is_the_same_and_pinned(case):
    _, features = case
    plain = laid_out(features.batch, None, pinned=False).layout
    pinned = laid_out(features.batch, None, pinned=True).layout
    asked = [chunk.asked for chunk in (*plain.chunks, *pinned.chunks)]
    assert asked[0].slot_S.equal(asked[1].slot_S) and asked[1].slot_S.is_pinned()
    assert pinned.document_T.is_pinned() and pinned.chunks[0].anchor_N.is_pinned()
