"""Gradients of the two parts of the loss, accumulated over micro-batches and replicas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dflash.losses import LossSums


@dataclass(frozen=True)
class Gradients:
    """Unnormalised gradients of the two parts of the loss, one tensor per leaf.

    They are kept apart because each part has a divisor of its own, and CAP's (how much was
    predicted correctly) is known only once the whole step has been seen.
    """

    main: list[Tensor]
    cap: list[Tensor] | None

    @classmethod
    def zeros(cls, leaves: Iterable[Tensor], *, with_cap: bool) -> Self:
        """Accumulators for these leaves."""
        main = [torch.zeros_like(leaf) for leaf in leaves]
        return cls(main, [torch.zeros_like(g) for g in main] if with_cap else None)

    def zero_(self) -> Self:
        """Start anew, in place."""
        for gradient in [*self.main, *(self.cap or [])]:
            gradient.zero_()
        return self

    @property
    def last(self) -> tuple[Tensor, Tensor | None]:
        """The two parts' gradients of the last leaf."""
        return self.main[-1], self.cap[-1] if self.cap else None

    def with_leaf(self, leaf: Tensor) -> "Gradients":
        """The same accumulators, and one more for `leaf`."""
        cap = None if self.cap is None else [*self.cap, torch.zeros_like(leaf)]
        return Gradients([*self.main, torch.zeros_like(leaf)], cap)

    def add(self, made: Tensor, main: Tensor, cap: Tensor | None, leaves: Sequence[Tensor]) -> None:
        """Accumulate what reaches `leaves` through `made`, given the two parts' gradients of it."""
        _backward(made, main, leaves, self.main, retain_graph=self.cap is not None)
        if self.cap is not None:
            assert cap is not None
            _backward(made, cap, leaves, self.cap)

    def combined(self, sums: LossSums, cap_lambda: float) -> tuple[list[Tensor], float]:
        """The whole step's gradients and their divisor: the loss's gradient is the quotient.

        main / sum w + cap_lambda cap / sum of w over correct slots. CAP is added to `main`.
        """
        weight, correct = float(sums.weight), float(sums.correct_weight)
        if self.cap is not None and correct > 0:
            for main, cap in zip(self.main, self.cap, strict=True):
                main.add_(cap, alpha=cap_lambda * weight / correct)
        return self.main, weight

    @staticmethod
    def total(parts: "list[Gradients]", device: torch.device) -> "Gradients":
        """The replicas' gradients summed in rank order: the same bits on every replica."""
        main = _summed([part.main for part in parts], device)
        caps = [part.cap for part in parts if part.cap is not None]
        return Gradients(main, _summed(caps, device) if caps else None)


def _backward(
    made: Tensor,
    gradient: Tensor,
    leaves: Sequence[Tensor],
    into: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> None:
    """Backward that adds up in `into`, one tensor per leaf, of whatever precision, in place."""
    gradients = torch.autograd.grad(
        made, leaves, gradient, retain_graph=retain_graph, allow_unused=True
    )
    for accumulator, gradient_of_leaf in zip(into, gradients, strict=True):
        if gradient_of_leaf is not None:
            accumulator += gradient_of_leaf


def _summed(parts: list[list[Tensor]], device: torch.device) -> list[Tensor]:
    total = [gradient.to(device, copy=True) for gradient in parts[0]]
    for part in parts[1:]:
        _accumulate(total, [gradient.to(device) for gradient in part])
    return total


def _accumulate(into: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    for total, gradient in zip(into, gradients, strict=True):
        total += gradient
