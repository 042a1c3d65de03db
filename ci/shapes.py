"""Sizes that the benchmarks run at, and what a training step at these sizes computes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

GAMMA = 7.0
"""Decay of the loss over a block of 16, the paper's."""


@dataclass(frozen=True)
class Shape:
    """Documents of one length laid end to end, and a drafter over them; every token is supervised.

    Attributes:
        documents, tokens, anchors: so many documents, of so many tokens, with so many anchors each.
        captured: target layers whose hidden states are the drafter's context.
    """

    name: str
    documents: int
    tokens: int
    anchors: int
    block: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    captured: int
    vocabulary: int

    @property
    def context_tokens(self) -> int:
        """T."""
        return self.documents * self.tokens

    @property
    def slots(self) -> int:
        """P: draft slots, the anchors' own included."""
        return self.documents * self.anchors * self.block

    @property
    def flops(self) -> float:
        """Floating-point operations that a step needs: forward and backward, nothing twice.

        Weights count 6 per use, and 4 where no gradient of the input is wanted (fc) or none of the
        weight (lm_head). A slot attends to half its document on average; attention's two products
        count 2 forward and 5 backward, with the scores made again.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * queries + 2 * keys + 3 * self.intermediate)
        attention = 3.5 * 4 * (self.tokens / 2) * queries
        slot = self.layers * (6 * weights + attention) + 4 * self.hidden * self.vocabulary
        context = 4 * self.captured * self.hidden**2 + self.layers * 6 * 2 * self.hidden * keys
        return self.slots * slot + self.context_tokens * context

    def with_(self, **sizes: int) -> "Shape":
        """The same but for these sizes, which its name then shows."""
        changed = "".join(f" {name} {value}" for name, value in sizes.items())
        return replace(self, name=self.name + changed, **sizes)


QWEN3_8B = Shape(
    name="8b",
    documents=1,
    tokens=3072,
    anchors=512,
    block=16,
    hidden=4096,
    intermediate=12288,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    captured=5,
    vocabulary=151936,
)
# Heads and intermediate size as in the public drafters for this target, whose own heads are 24 of
# 256; full attention in every layer, and documents as above, are this benchmark's choice.
QWEN36_27B = Shape(
    name="27b",
    documents=1,
    tokens=3072,
    anchors=512,
    block=32,
    hidden=5120,
    intermediate=17408,
    layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    captured=5,
    vocabulary=248320,
)
SMALL = Shape(
    name="small",
    documents=1,
    tokens=512,
    anchors=64,
    block=8,
    hidden=256,
    intermediate=768,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=64,
    captured=3,
    vocabulary=8192,
)
TINY = Shape(
    name="tiny",
    documents=1,
    tokens=96,
    anchors=8,
    block=4,
    hidden=32,
    intermediate=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    captured=2,
    vocabulary=256,
)


@dataclass(frozen=True)
class Contender:
    """A training step to measure, and what it consists of."""

    step: Callable[[], object]
    uses: str
