"""Draft trees: the likeliest prefixes, who sees whom, and which nodes are accepted."""

import itertools

import pytest
import torch

from dflash.tree import Candidates, DraftTree


def candidates(slots, width, seed=0):
    """Random slots of `width` tokens each, best first; all their tokens are different."""
    random = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(slots, width, generator=random).log_softmax(-1).sort(descending=True)
    ids = torch.arange(slots * width).view(slots, width)
    return [Candidates(*row) for row in zip(ids.tolist(), log_probs.values.tolist(), strict=True)]


def prefixes(tree):
    """Every node as the tokens on the way to it, the anchor left out."""
    found = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("nodes", [1, 2, 7, 20, 84])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tree_holds_the_likeliest_prefixes_likeliest_first(nodes, seed):
    """Against all 4 + 16 + 64 prefixes of three slots with four tokens each."""
    slots = candidates(3, 4, seed)
    ranked = []
    for length in (1, 2, 3):
        for ranks in itertools.product(range(4), repeat=length):
            score = sum(slots[i].log_probs[rank] for i, rank in enumerate(ranks))
            ranked.append((-score, tuple(slots[i].tokens[rank] for i, rank in enumerate(ranks))))
    expected = [tokens for _, tokens in sorted(ranked)[:nodes]]
    tree = DraftTree.best_first(99, slots, nodes)
    assert tree.tokens[0] == 99
    assert prefixes(tree) == expected


def test_a_budget_past_all_prefixes_holds_all():
    assert len(DraftTree.best_first(9, candidates(2, 3), 1000).tokens) == 1 + 3 + 9


def test_a_certain_drafter_gets_a_chain():
    sure = [Candidates([7, 8], [0.0, -50.0]), Candidates([5, 6], [0.0, -50.0])]
    tree = DraftTree.best_first(1, sure, 2)
    assert tree == DraftTree.chain(1, [7, 5])
    assert tree.is_chain
    assert not DraftTree.best_first(1, sure, 3).is_chain


def test_nodes_see_their_ancestors_and_themselves():
    tree = DraftTree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 3])
    assert tree.depths == [0, 1, 1, 2, 3]
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert tree.visible_MM().int().tolist() == expected
    assert DraftTree.chain(1, [2, 3]).visible_MM().equal(torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize(
    ("answers", "path"),
    [
        ([2, 4, 0, 5, 0], [1, 3, 4]),
        ([2, 4, 0, 9, 0], [1, 3]),
        ([3, 4, 4, 5, 0], [2]),
        ([9, 4, 0, 5, 0], []),
        ([1, 1, 1, 1, 1], []),
    ],
)
def test_the_accepted_path_follows_the_answers(answers, path):
    assert DraftTree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 3]).path(answers) == path


def test_a_chain_is_accepted_up_to_the_first_wrong_token():
    chain = DraftTree.chain(1, [2, 3, 4])
    assert chain.path([2, 3, 9, 4]) == [1, 2]
    assert chain.path([2, 3, 4, 9]) == [1, 2, 3]
    assert chain.path([9, 3, 4, 5]) == []
