"""The drafter's passes over one micro-batch: the context, each chunk and back, the context back.

T context tokens, P draft slots of a chunk, D hidden size, F = captured layers x D.
"""

from typing import Protocol

import torch
from torch import Tensor

from dflash.compile import backward_on_this_thread
from dflash.drafter import Drafter
from dflash.gradients import GradientSums, ReachedByParts, backward
from dflash.layers import EAGER, HowLayersRun
from dflash.layout import Chunk, Layout


class Passes(Protocol):
    """`begin`, then `draft` and `backward` for each chunk, then `end`; gradients add up."""

    def begin(self, features_TF: Tensor, layout: Layout) -> None:
        """Read the context: everything lies on the drafter's device."""

    def draft(self, chunk: Chunk) -> Tensor:
        """Hidden states of the chunk's slots, [P, D], without a graph."""

    def backward(self, main_PD: Tensor, cap_PD: Tensor | None) -> None:
        """Take the gradients of what `draft` has just returned to the weights and the context."""

    def end(self) -> None:
        """Take the context's gradients to the weights."""


class EagerPasses:
    """Passes as they come: layers may be compiled, autograd keeps what backward needs.

    Everything is computed in the precision of the drafter's weights; `sums` has its own.

    The chunks share the context: its gradients meet at a leaf, and go on once.
    """

    def __init__(
        self, drafter: Drafter, embedding_VD: Tensor, how: HowLayersRun, sums: GradientSums
    ) -> None:
        self.drafter, self.embedding_VD, self.how, self.sums = drafter, embedding_VD, how, sums
        self.parameters = list(drafter.parameters())

    def begin(self, features_TF: Tensor, layout: Layout) -> None:
        """See `Passes`."""
        self.context_TD = self.drafter.context(features_TF)
        self.leaf_TD = self.context_TD.detach().requires_grad_()
        self.by_part_TD = [torch.zeros_like(self.leaf_TD) for _ in self.sums.parts]
        self.layout = layout

    def draft(self, chunk: Chunk) -> Tensor:
        """See `Passes`."""
        inputs_PD = self.embedding_VD[chunk.inputs_NB.flatten()]
        if self.how is not EAGER:
            # Nobody wants this gradient, but with it the first layer is compiled like the others.
            inputs_PD.requires_grad_()
        self.hidden_PD = self.drafter.draft(
            inputs_PD,
            self.leaf_TD,
            self.layout.document_T,
            self.layout.position_T,
            chunk.anchor_N,
            self.how,
        )
        return self.hidden_PD.detach()

    def backward(self, main_PD: Tensor, cap_PD: Tensor | None) -> None:
        """See `Passes`."""
        self.sums.add(self.weights_and_leaf(main_PD, cap_PD))

    def weights_and_leaf(self, main_PD: Tensor, cap_PD: Tensor | None) -> ReachedByParts:
        """The gradients of the weights; the context's are added up here."""
        leaves = [*self.parameters, self.leaf_TD]
        by_part_PD = [main_PD] if cap_PD is None else [main_PD, cap_PD]
        with backward_on_this_thread():
            reached = backward(self.hidden_PD, by_part_PD, leaves)
        for total_TD, (*_, context_TD) in zip(self.by_part_TD, reached, strict=True):
            assert context_TD is not None  # all slots see it
            total_TD += context_TD
        return [gradients[:-1] for gradients in reached]

    def end(self) -> None:
        """See `Passes`."""
        self.sums.add(self.weights_of_context())
        self.forget()

    def weights_of_context(self) -> ReachedByParts:
        """The gradients of the weights that the context was made with."""
        with backward_on_this_thread():
            return backward(self.context_TD, self.by_part_TD, self.parameters)

    def forget(self) -> None:
        """Let go of what belongs to this micro-batch."""
        del self.context_TD, self.leaf_TD, self.hidden_PD, self.by_part_TD, self.layout
