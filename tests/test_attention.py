"""The block mask against a plain loop, and attention per document against attention over all."""

import random

import pytest
import torch
import torch.nn.functional as F

from dflash.attention import attend, block_mask, document_masks

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
