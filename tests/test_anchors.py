"""Anchors: which are eligible, how they are drawn, and the blocks made from them.

A document is written as a string: '#' is a supervised token, '.' is not.
"""

import math
from collections import Counter

import pytest
import torch

from dflash.anchors import eligible_anchors, make_blocks, sample_anchors

MASK = 999


def layout(*documents):
    """(tokens, loss_mask, document) of documents laid end to end; token t has the id 100 + t."""
    text = "".join(documents)
    ids = [i for i, document in enumerate(documents) for _ in document]
    tokens_T = torch.arange(100, 100 + len(text))
    mask_T = torch.tensor([c == "#" for c in text], dtype=torch.bool)
    return tokens_T, mask_T, torch.tensor(ids, dtype=torch.long)


def random_documents(seed):
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    return ["".join(".##"[draw(0, 3)] for _ in range(draw(1, 30))) for _ in range(draw(1, 6))]


def draw(eligible_T, document_T, seed=0, per_document=10**6, in_all=10**6):
    return sample_anchors(
        eligible_T,
        document_T,
        per_document=per_document,
        in_all=in_all,
        generator=torch.Generator().manual_seed(seed),
    )


def blocks_of(documents, anchors, block_size=4, gamma=2.0):
    tokens_T, mask_T, document_T = layout(*documents)
    return make_blocks(
        tokens_T,
        mask_T,
        document_T,
        torch.tensor(anchors, dtype=torch.long),
        block_size=block_size,
        mask_token_id=MASK,
        gamma=gamma,
    )


def test_an_anchor_and_its_successor_are_supervised_and_of_one_document():
    _, mask_T, document_T = layout("..##.#", "##", "#")
    assert eligible_anchors(mask_T, document_T).nonzero().flatten().tolist() == [2, 6]


@pytest.mark.parametrize("seed", range(20))
def test_eligible_anchors_equal_a_loop_over_every_document(seed):
    documents = random_documents(seed)
    _, mask_T, document_T = layout(*documents)
    expected, start = [], 0
    for document in documents:
        expected += [start + i for i in range(len(document)) if document[i : i + 2] == "##"]
        start += len(document)
    assert eligible_anchors(mask_T, document_T).nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("per_document", [1, 3, 100])
def test_each_document_gives_its_share_without_replacement(seed, per_document):
    _, mask_T, document_T = layout(*random_documents(seed))
    eligible_T = eligible_anchors(mask_T, document_T)
    anchors = draw(eligible_T, document_T, seed, per_document=per_document).tolist()

    assert anchors == sorted(set(anchors))
    assert all(eligible_T[anchor] for anchor in anchors)
    there = Counter(document_T[eligible_T].tolist())
    drawn = Counter(document_T[anchors].tolist())
    assert drawn == {document: min(n, per_document) for document, n in there.items()}


def test_no_more_anchors_than_the_cap_in_all():
    _, mask_T, document_T = layout("#" * 20, "#" * 20)
    anchors = draw(eligible_anchors(mask_T, document_T), document_T, per_document=10, in_all=7)
    assert len(anchors) == len(set(anchors.tolist())) == 7
    assert anchors.tolist() == sorted(anchors.tolist())


@pytest.mark.parametrize(
    ("per_document", "in_all", "share"), [(2, 100, 2 / 7), (100, 4, 4 / 14), (3, 4, 4 / 14)]
)
def test_every_eligible_anchor_is_drawn_equally_often(per_document, in_all, share):
    _, mask_T, document_T = layout("#" * 8, "#" * 8)
    eligible_T = eligible_anchors(mask_T, document_T)
    trials = 2000
    times = Counter(
        anchor
        for seed in range(trials)
        for anchor in draw(eligible_T, document_T, seed, per_document, in_all).tolist()
    )
    four_deviations = 4 * math.sqrt(share * (1 - share) / trials)
    assert set(times) == set(eligible_T.nonzero().flatten().tolist())
    assert all(abs(n / trials - share) < four_deviations for n in times.values())


def covered(documents, anchors, block_size):
    """Share of the supervised tokens that some block asks for."""
    blocks = blocks_of(documents, anchors, block_size)
    asked = blocks.anchor_N[:, None] + torch.arange(block_size)
    supervised = sum(document.count("#") for document in documents)
    return len(asked[blocks.weights_NB > 0].unique()) / supervised


def test_drawing_per_document_covers_more_than_one_draw_per_packed_row():
    documents = ["#" * 300, *["#" * 10] * 20]
    _, mask_T, document_T = layout(*documents)
    eligible_T = eligible_anchors(mask_T, document_T)
    per_document = draw(eligible_T, document_T, per_document=16).tolist()
    # The control: the row taken for one document, with the same number of anchors per draw.
    per_row = draw(eligible_T, torch.zeros_like(document_T), per_document=16).tolist()

    assert set(document_T[per_document].tolist()) == set(range(21))
    assert set(document_T[per_row].tolist()) != set(range(21))
    assert covered(documents, per_document, 8) > 2 * covered(documents, per_row, 8)


def test_the_draw_depends_on_its_generator_alone():
    _, mask_T, document_T = layout("#" * 40)
    eligible_T = eligible_anchors(mask_T, document_T)
    before = torch.get_rng_state()
    first = draw(eligible_T, document_T, seed=1, per_document=5)
    torch.rand(3)
    assert draw(eligible_T, document_T, seed=1, per_document=5).equal(first)
    assert not draw(eligible_T, document_T, seed=2, per_document=5).equal(first)
    torch.set_rng_state(before)
    draw(eligible_T, document_T, seed=1, per_document=5, in_all=2)
    assert torch.get_rng_state().equal(before)


def test_blocks_by_hand():
    half = math.exp(-1 / 2)
    blocks = blocks_of(["..###.##", "###"], anchors=[2, 6, 8], block_size=4, gamma=2.0)

    assert blocks.anchor_N.tolist() == [2, 6, 8]
    assert blocks.inputs_NB.tolist() == [[t, MASK, MASK, MASK] for t in (102, 106, 108)]
    assert blocks.labels_NB.tolist() == [
        [0, 103, 104, 0],  # supervision stops at the gap
        [0, 107, 0, 0],  # the document ends
        [0, 109, 110, 0],  # everything ends
    ]
    expected = torch.tensor([[0, 1, half, 0], [0, 1, 0, 0], [0, 1, half, 0]])
    torch.testing.assert_close(blocks.weights_NB, expected)


def test_supervision_does_not_come_back_after_a_gap():
    blocks = blocks_of(["##.####"], anchors=[0], block_size=7)
    assert (blocks.weights_NB > 0).tolist() == [[False, True, *[False] * 5]]


@pytest.mark.parametrize("gamma", [1.0, 7.0])
def test_weights_decay_with_the_slot(gamma):
    blocks = blocks_of(["#" * 10], anchors=[0], block_size=8, gamma=gamma)
    expected = [0.0, *(math.exp(-(k - 1) / gamma) for k in range(1, 8))]
    torch.testing.assert_close(blocks.weights_NB[0], torch.tensor(expected))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_equal_a_loop_over_every_slot(seed):
    documents = random_documents(seed)
    tokens_T, mask_T, document_T = layout(*documents)
    anchors = draw(eligible_anchors(mask_T, document_T), document_T, seed).tolist()
    blocks = blocks_of(documents, anchors, block_size=5, gamma=3.0)
    for row, anchor in enumerate(anchors):
        asked = True
        for k in range(1, 5):
            t = anchor + k
            asked = asked and t < len(tokens_T) and bool(document_T[t] == document_T[anchor])
            asked = asked and bool(mask_T[t])
            assert blocks.labels_NB[row, k] == (tokens_T[t] if asked else 0)
            weight = math.exp(-(k - 1) / 3.0) if asked else 0.0
            assert blocks.weights_NB[row, k].item() == pytest.approx(weight)


def test_nothing_gives_no_blocks():
    _, mask_T, document_T = layout()
    assert draw(eligible_anchors(mask_T, document_T), document_T).tolist() == []
    assert blocks_of([], []).labels_NB.shape == (0, 4)
