"""The block mask against a plain loop, and attention per document against attention over all."""

import random

import pytest
import torch
import torch.nn.functional as F

from dflash.attention import (
    TILE,
    attend,
    attend_tiled,
    block_mask,
    document_masks,
    tiled_mask,
)

SEEDS = range(15)


def random_layout(seed):
    """(documents, anchors, block size): some documents have no anchor, some one at their start."""
    rng = random.Random(seed)
    documents, anchors = [], []
    for document in range(rng.randint(1, 4)):
        start, length = len(documents), rng.randint(1, 9)
        documents += [document] * length
        anchors += sorted(rng.sample(range(start, start + length), rng.randint(0, min(3, length))))
    return documents, anchors or [0], rng.randint(2, 4)


def naive_mask(documents, anchors, block, window):
    slots = [(b, i) for b in range(len(anchors)) for i in range(block)]
    rows = []
    for b, i in slots:
        anchor, row = anchors[b], []
        for t, document in enumerate(documents):
            near = not window or anchor + i - t < window
            row.append(document == documents[anchor] and t < anchor and near)
        for other, j in slots:
            near = not window or 0 <= i - j < window
            row.append(other == b and near)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", SEEDS)
def test_block_mask_equals_a_plain_loop(seed, window):
    documents, anchors, block = random_layout(seed)
    mask = block_mask(torch.tensor(documents), torch.tensor(anchors), block, window)
    assert mask.equal(naive_mask(documents, anchors, block, window))


def test_block_mask_by_hand():
    mask = block_mask(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1, 4]), block_size=2)
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_a_sliding_window_is_causal_inside_the_block():
    mask = block_mask(torch.zeros(5, dtype=torch.long), torch.tensor([4]), block_size=3, window=3)
    assert mask.int().tolist() == [
        [0, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_per_document_equals_attention_under_the_whole_mask(seed, window):
    documents, anchors, block = random_layout(seed)
    document_T, anchor_N = torch.tensor(documents), torch.tensor(anchors)
    slots = len(anchors) * block
    generator = torch.Generator().manual_seed(seed)
    query_HPE = torch.randn(4, slots, 8, generator=generator)
    key_GKE, value_GKE = torch.randn(2, 2, len(documents) + slots, 8, generator=generator)

    out_HPE = attend(
        query_HPE, key_GKE, value_GKE, document_masks(document_T, anchor_N, block, window)
    )
    expected_HPE = F.scaled_dot_product_attention(
        query_HPE,
        key_GKE.repeat_interleave(2, 0),
        value_GKE.repeat_interleave(2, 0),
        attn_mask=naive_mask(documents, anchors, block, window),
    )
    torch.testing.assert_close(out_HPE, expected_HPE)


def test_only_documents_with_anchors_get_a_mask_and_it_lies_where_they_lie():
    document_T = torch.tensor([0] * 3 + [1] * 2 + [2] * 4)
    masks = document_masks(document_T, torch.tensor([0, 2, 7]), block_size=2)
    places = [(m.context.start, m.context.stop, m.drafts.start, m.drafts.stop) for m in masks]
    assert places == [(0, 3, 0, 4), (5, 9, 4, 6)]
    assert [tuple(m.mask.shape) for m in masks] == [(4, 3 + 4), (2, 4 + 2)]


def large_layout(seed, block, *, context=384, slots=256, documents=4):
    """Random documents and anchors at a size of whole tiles, the last document being padding.

    Some documents have no anchor, some one at their start; the last blocks are the padding's.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(low, high, count):
        return torch.randint(low, high, (count,), generator=random)

    ends = torch.cat([draw(1, context - 1, documents), torch.tensor([context])])
    document_T = (torch.arange(context)[:, None] >= ends.sort().values[:-1]).sum(1)
    padding_N = torch.full((slots // block // 5,), int(ends.sort().values[-2]))
    anchor_N = draw(0, context, slots // block - len(padding_N))
    anchor_N = anchor_N[document_T[anchor_N] != 1]  # this one has none
    anchor_N = anchor_N[: slots // block - len(padding_N)]
    missing = slots // block - len(anchor_N) - len(padding_N)
    anchor_N = torch.cat([anchor_N, torch.zeros(missing, dtype=torch.long), padding_N])
    return document_T, anchor_N.sort().values


BLOCKS_AND_SLOTS = [(4, 256), (16, 256), (10, 640), (128, 256), (256, 512)]


@pytest.mark.parametrize("window", [0, 1, 40, 300])
@pytest.mark.parametrize(("block", "slots"), BLOCKS_AND_SLOTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_tiled_mask_is_the_dense_one(seed, block, slots, window):
    document_T, anchor_N = large_layout(seed, block, slots=slots)
    dense_PK = block_mask(document_T, anchor_N, block, window)
    tiled = tiled_mask(document_T, anchor_N, block, window)

    slot_P, key_K = torch.arange(dense_PK.shape[0])[:, None], torch.arange(dense_PK.shape[1])
    zero = torch.zeros((), dtype=torch.long)
    assert tiled.mask_mod(zero, zero, slot_P, key_K).equal(dense_PK)

    seen = dense_PK.view(dense_PK.shape[0] // TILE, TILE, -1, TILE)
    any_QK, all_QK = seen.any(3).any(1), seen.all(3).all(1)
    partial_QK, full_QK = (
        listed(tiled.kv_num_blocks, tiled.kv_indices),
        listed(tiled.full_kv_num_blocks, tiled.full_kv_indices),
    )
    assert not (full_QK & ~all_QK).any()  # nobody would ask its pairs
    assert not (any_QK & ~partial_QK & ~full_QK).any()  # nobody would look there
    assert not (partial_QK & full_QK).any()  # it would be counted twice


def listed(counts, indices):
    """The tiles that a BlockMask lists, as a matrix."""
    rows, columns = indices.shape[2:]
    tiles = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        tiles[row, indices[0, 0, row, : counts[0, 0, row]].long()] = True
    return tiles


def test_full_tiles_are_found():
    """Or FlexAttention would ask every pair, which is right and slow."""
    document_T, anchor_N = torch.zeros(1024, dtype=torch.long), torch.arange(900, 932)
    tiled = tiled_mask(document_T, anchor_N, 16)
    assert tiled.full_kv_num_blocks.tolist() == [[[7] * 4]]
    assert tiled.kv_num_blocks.tolist() == [[[2] * 4]]  # the tile with the anchors, and their own


def test_sizes_that_are_no_whole_tiles_are_refused():
    with pytest.raises(ValueError, match="100 tokens and 128 slots: must be multiples of 128"):
        tiled_mask(torch.zeros(100, dtype=torch.long), torch.arange(8), 16)


@pytest.mark.parametrize("window", [0, 40])
def test_flex_attention_on_the_cpu_equals_dense_attention(window):
    """Forward only: FlexAttention has no backward on the CPU."""
    document_T, anchor_N = large_layout(0, 16)
    query_HPE, key_GKE, value_GKE = operands(len(document_T), 256, torch.float32, "cpu")
    got_HPE = attend_tiled(
        query_HPE, key_GKE, value_GKE, tiled_mask(document_T, anchor_N, 16, window)
    )
    expected_HPE = attend(
        query_HPE, key_GKE, value_GKE, document_masks(document_T, anchor_N, 16, window)
    )
    torch.testing.assert_close(got_HPE, expected_HPE)


def operands(context, slots, dtype, device):
    """Queries of 8 heads, keys and values of 2, drawn anew."""
    random = torch.Generator().manual_seed(context + slots)
    sizes = ((8, slots), (2, context + slots), (2, context + slots))
    return [torch.randn(*s, 64, generator=random).to(device, dtype) for s in sizes]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize(
    ("block", "slots", "window"), [(16, 256, 0), (16, 256, 40), (10, 640, 0), (32, 256, 300)]
)
def test_compiled_flex_attention_equals_dense_attention_in_float64(
    block, slots, window, dtype, tolerance
):
    """Forward and gradients, relative to their norm, over several layouts with one compile."""
    compiled = torch.compile(attend_tiled, dynamic=False, fullgraph=True)
    for seed in range(4):
        document_T, anchor_N = large_layout(seed, block, slots=slots)
        inputs = operands(len(document_T), slots, dtype, "cuda")
        wanted_HPE = torch.randn(8, slots, 64, generator=torch.Generator().manual_seed(seed))
        got = with_gradients(
            compiled,
            inputs,
            tiled_mask(document_T.cuda(), anchor_N.cuda(), block, window),
            wanted_HPE.to("cuda", dtype),
        )
        expected = with_gradients(
            attend,
            [tensor.cpu().double() for tensor in inputs],
            document_masks(document_T, anchor_N, block, window),
            wanted_HPE.double(),
        )
        for name, mine, exact in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            error = (mine.cpu().double() - exact).norm() / exact.norm()
            assert error < tolerance, (name, seed, float(error))


def with_gradients(attention, inputs, mask, wanted_HPE):
    """The output, and the gradients of its product with `wanted_HPE`."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out_HPE = attention(*leaves, mask)
    return [out_HPE.detach(), *torch.autograd.grad((out_HPE * wanted_HPE).sum(), leaves)]
