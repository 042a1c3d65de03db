"""How micro-batches make optimizer steps."""

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class StepPlan:
    """How micro-batches make steps: step s takes the batches from s x per_step on."""

    first_step: int
    total_steps: int
    drafters: int
    grad_accum: int

    @classmethod
    def of(cls, batches: int, *, drafters: int, grad_accum: int, first_step: int) -> Self:
        """The steps that `batches` micro-batches make; fillers complete the last one."""
        total_steps = math.ceil(batches / (drafters * grad_accum))
        return cls(min(first_step, total_steps), total_steps, drafters, grad_accum)

    @property
    def per_step(self) -> int:
        """Micro-batches of one optimizer step, over all drafters."""
        return self.drafters * self.grad_accum

    @property
    def first_batch(self) -> int:
        """Index of the first micro-batch to be made."""
        return self.first_step * self.per_step

    @property
    def end_batch(self) -> int:
        """Index after the last micro-batch, fillers of the last step included."""
        return self.total_steps * self.per_step
