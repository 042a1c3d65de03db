"""Gradients of the two parts of the loss, accumulated over micro-batches and replicas."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.losses import LossSums

Reached = Sequence[Tensor | None]
"""One gradient per leaf, None where nothing reaches it."""
ReachedByParts = list[Reached]
"""Those of each part of the loss: the main one and, where it has a weight, CAP."""


@dataclass(frozen=True)
class Gradients:
    """Unnormalised gradients of the two parts of the loss, one tensor per leaf.

    They are kept apart because each part has a divisor of its own, and CAP's (how much was
    predicted correctly) is known only once the whole step has been seen.
    """

    main: list[Tensor]
    cap: list[Tensor] | None

    def combined(self, sums: LossSums, cap_lambda: float) -> tuple[list[Tensor], Tensor]:
        """The whole step's gradients and their divisor: the loss's gradient is the quotient.

        main / sum w + cap_lambda cap / sum of w over correct slots. CAP is added to `main`. The
        sums lie on the gradients' device; the host waits for nothing.
        """
        if self.cap is not None:
            # Without a correct slot, CAP's gradients are 0.
            correct = torch.where(sums.correct_weight > 0, sums.correct_weight, 1.0)
            factor = cap_lambda * sums.weight / correct
            for main, cap in zip(self.main, self.cap, strict=True):
                main.addcmul_(cap, factor.to(main.dtype))
        return self.main, sums.weight

    @staticmethod
    def total(parts: "list[Gradients]", device: torch.device) -> "Gradients":
        """The replicas' gradients summed in rank order: the same bits on every replica."""
        main = _summed([part.main for part in parts], device)
        caps = [part.cap for part in parts if part.cap is not None]
        return Gradients(main, _summed(caps, device) if caps else None)


class GradientSums:
    """Adds up one replica's gradients over a step, in the leaves' precision.

    A gradient that nothing is added to is kept as it came: that is exact, and takes no pass over
    the memory. `shared`: the sums are changed afterwards, and are therefore tensors of its own, in
    the same memory for every step.
    """

    def __init__(self, leaves: Sequence[Tensor], *, with_cap: bool, shared: bool) -> None:
        self.parts = [_Sums(leaves) for _ in range(1 + with_cap)]
        self.with_cap, self.shared = with_cap, shared or with_cap

    def start(self) -> None:
        """Forget what was added so far."""
        for part in self.parts:
            part.start()

    def add(self, reached: ReachedByParts) -> None:
        """Add gradients, as `backward` returns them."""
        for part, gradients in zip(self.parts, reached, strict=True):
            part.add(gradients)

    def before_overwriting(self) -> None:
        """Copy what was kept as it came: that memory is about to hold something else."""
        for part in self.parts:
            part.before_overwriting()

    def finish(self) -> Gradients:
        """The sums since `start`: not copies, they hold until the next gradients are made."""
        main, *cap = (part.finish(self.shared) for part in self.parts)
        return Gradients(main, cap[0] if cap else None)


class _Sums:
    """Those of one part: `now` by the leaf's number, some in `own` memory, some as they came."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.own: dict[int, Tensor] = {}
        self.start()

    def start(self) -> None:
        self.now: dict[int, Tensor] = {}

    def add(self, gradients: Reached) -> None:
        reached = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        later = reached.keys() & self.now.keys()
        self.now = reached | self.now
        self._make_own(later)
        for i in later:
            self.now[i] += reached[i]

    def before_overwriting(self) -> None:
        self._make_own(self.now.keys())

    def finish(self, shared: bool) -> list[Tensor]:
        everything = set(range(len(self.leaves)))
        for i in everything - self.now.keys():
            self.now[i] = torch.zeros_like(self.leaves[i])
        strided = {i for i, gradient in self.now.items() if not gradient.is_contiguous()}
        self._make_own(everything if shared else strided)
        return [self.now[i] for i in sorted(everything)]

    def _make_own(self, numbers: Set[int]) -> None:
        foreign = [i for i in sorted(numbers) if self.now[i] is not self.own.get(i)]
        for i in foreign:
            self.own.setdefault(i, torch.empty_like(self.leaves[i]))
        if foreign:
            torch._foreach_copy_([self.own[i] for i in foreign], [self.now[i] for i in foreign])
        self.now.update((i, self.own[i]) for i in foreign)


def backward(made: Tensor, by_part: Sequence[Tensor], leaves: Sequence[Tensor]) -> ReachedByParts:
    """What reaches `leaves` through `made`, given its gradient by each part of the loss."""
    last = len(by_part) - 1
    return [
        torch.autograd.grad(made, leaves, gradient, retain_graph=i < last, allow_unused=True)
        for i, gradient in enumerate(by_part)
    ]


def _summed(parts: list[list[Tensor]], device: torch.device) -> list[Tensor]:
    total = [gradient.to(device, copy=True) for gradient in parts[0]]
    for part in parts[1:]:
        for into, gradient in zip(total, part, strict=True):
            into += gradient.to(device)
    return total
