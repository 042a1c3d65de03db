"""Gradients of the two parts of the loss, accumulated over micro-batches and replicas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.losses import LossSums

Reached = Sequence[Tensor | None]
"""One gradient per leaf, None where nothing reaches it."""
ReachedByBoth = tuple[Reached, Reached | None]
"""Those of the loss's two parts; None for all of CAP where there is none."""


@dataclass(frozen=True)
class Gradients:
    """Unnormalised gradients of the two parts of the loss, one tensor per leaf.

    They are kept apart because each part has a divisor of its own, and CAP's (how much was
    predicted correctly) is known only once the whole step has been seen.
    """

    main: list[Tensor]
    cap: list[Tensor] | None

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


class GradientSums:
    """Adds up one replica's gradients over the micro-batches of a step, in the leaves' precision.

    The sums lie in the same memory for every step.
    """

    def __init__(self, leaves: Iterable[Tensor], *, with_cap: bool) -> None:
        self.main = _Sums([torch.zeros_like(leaf) for leaf in leaves])
        self.cap = (
            _Sums([torch.zeros_like(total) for total in self.main.totals]) if with_cap else None
        )

    def start(self) -> None:
        """Forget what was added so far."""
        for part in self._parts():
            part.start()

    def add(self, main: Reached, cap: Reached | None) -> None:
        """Add the two parts' gradients, as `backward` returns them."""
        self.main.add(main)
        if self.cap is not None:
            assert cap is not None
            self.cap.add(cap)

    def finish(self) -> Gradients:
        """The sums since `start`: not copies, they hold until the next `start`."""
        for part in self._parts():
            part.finish()
        return Gradients(self.main.totals, self.cap.totals if self.cap else None)

    def _parts(self) -> "list[_Sums]":
        return [self.main, *([self.cap] if self.cap else [])]


class _Sums:
    """What is added first is copied: that costs half as much as zeros and an addition."""

    def __init__(self, totals: list[Tensor]) -> None:
        self.totals = totals
        self.start()

    def start(self) -> None:
        self.missing = set(range(len(self.totals)))

    def add(self, gradients: Reached) -> None:
        reached = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        first = sorted(self.missing & reached.keys())
        if first:
            torch._foreach_copy_([self.totals[i] for i in first], [reached[i] for i in first])
        for i in reached.keys() - self.missing:
            self.totals[i] += reached[i]
        self.missing.difference_update(first)

    def finish(self) -> None:
        for i in self.missing:
            self.totals[i].zero_()
        self.missing.clear()


def backward(
    made: Tensor, main: Tensor, cap: Tensor | None, leaves: Sequence[Tensor]
) -> ReachedByBoth:
    """What reaches `leaves` through `made`, given the two parts' gradients of it."""

    def of(gradient: Tensor, retain_graph: bool) -> Reached:
        return torch.autograd.grad(
            made, leaves, gradient, retain_graph=retain_graph, allow_unused=True
        )

    return of(main, cap is not None), None if cap is None else of(cap, False)


def _summed(parts: list[list[Tensor]], device: torch.device) -> list[Tensor]:
    total = [gradient.to(device, copy=True) for gradient in parts[0]]
    for part in parts[1:]:
        for into, gradient in zip(total, part, strict=True):
            into += gradient.to(device)
    return total
