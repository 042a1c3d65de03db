"""Draft trees: what one verification pass of the target checks. M nodes, the anchor included.

A chain is the greedy draft. DDTree (best-first over the per-position marginals of one drafter pass)
spends the same pass on the likeliest prefixes instead; it needs no other drafter.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The likeliest tokens of one draft slot, best first, and their log-probabilities."""

    tokens: Sequence[int]
    log_probs: Sequence[float]


@dataclass(frozen=True)
class DraftTree:
    """Node 0 is the anchor, with parent -1; every other node comes after its parent."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def chain(cls, anchor: int, draft: Sequence[int]) -> Self:
        """One continuation: every node is the child of the one before it."""
        return cls([anchor, *draft], list(range(-1, len(draft))))

    @classmethod
    def best_first(cls, anchor: int, slots: Sequence[Candidates], nodes: int) -> Self:
        """The `nodes` likeliest prefixes, if a prefix is as likely as the product of its tokens.

        A prefix is never likelier than its parent, so that the best one outside the tree is always
        the next child, or the next sibling, of one inside it.
        """
        tree, order = cls([anchor], [-1]), count()
        waiting = [(-slots[0].log_probs[0], next(order), 0.0, 0, 0, 0)]
        while waiting and len(tree.tokens) <= nodes:
            negative, _, above, parent, slot, rank = heapq.heappop(waiting)
            tree.tokens.append(slots[slot].tokens[rank])
            tree.parents.append(parent)
            node, score = len(tree.tokens) - 1, -negative
            if slot + 1 < len(slots):
                child = -(score + slots[slot + 1].log_probs[0])
                heapq.heappush(waiting, (child, next(order), score, node, slot + 1, 0))
            if rank + 1 < len(slots[slot].tokens):
                sibling = -(above + slots[slot].log_probs[rank + 1])
                heapq.heappush(waiting, (sibling, next(order), above, parent, slot, rank + 1))
        return tree

    @property
    def is_chain(self) -> bool:
        """Whether a causal mask is all that it needs."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Tokens between each node and the anchor: 0 for the anchor, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def visible_MM(self) -> Tensor:
        """Whom each node sees: its ancestors and itself."""
        seen_MM = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            seen_MM[node] |= seen_MM[parent]
        return seen_MM

    def path(self, answers: Sequence[int]) -> list[int]:
        """The accepted nodes, from the anchor's child on; `answers`: the true token after each."""
        child = {
            edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path, node = [], 0
        while (node := child.get((node, answers[node]), 0)) > 0:
            path.append(node)
        return path
