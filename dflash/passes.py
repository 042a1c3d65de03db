"""The drafter's passes over one micro-batch: the context, each chunk and back, the context back.

T context tokens, P draft slots of a chunk, D hidden size, F = captured layers x D.
"""

from typing import Protocol

from torch import Tensor

from dflash.compile import backward_on_this_thread
from dflash.drafter import Drafter
from dflash.gradients import Gradients
from dflash.layers import EAGER, HowLayersRun
from dflash.shapes import Chunk, Layout


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

    Everything is computed in the precision of the drafter's weights; gradients have their own.

    The chunks share the context: its gradients meet at a leaf, and go on once.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding_VD: Tensor,
        how: HowLayersRun,
        gradients: Gradients,
    ) -> None:
        self.drafter, self.embedding_VD, self.how = drafter, embedding_VD, how
        self.gradients = gradients
        self.parameters = list(drafter.parameters())

    def begin(self, features_TF: Tensor, layout: Layout) -> None:
        """See `Passes`."""
        self.context_TD = self.drafter.context(features_TF)
        self.leaf_TD = self.context_TD.detach().requires_grad_()
        self.with_leaf = self.gradients.with_leaf(self.leaf_TD)
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
        with backward_on_this_thread():
            self.with_leaf.add(self.hidden_PD, main_PD, cap_PD, [*self.parameters, self.leaf_TD])

    def end(self) -> None:
        """See `Passes`."""
        main_TD, cap_TD = self.with_leaf.last
        with backward_on_this_thread():
            self.gradients.add(self.context_TD, main_TD, cap_TD, self.parameters)
        del self.context_TD, self.leaf_TD, self.hidden_PD, self.with_leaf, self.layout
