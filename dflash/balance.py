"""How a run's GPUs were divided between target and drafters, and whether another way is faster."""

import logging
from statistics import median

from dflash.metrics import StepMetrics

log = logging.getLogger(__name__)

ENOUGH = 20  # steps; fewer say little about how the stages wait
LIMITS = 0.9
"""A stage that works so much of the time is what the others wait for."""


class BalanceSink:
    """Says at the end how busy each stage was, and which division of the GPUs would suit the run.

    What a stage has to do takes its GPUs times the share of time in which its threads did not wait.
    The shares are medians over the steps: evaluations and checkpoints are exceptions.
    """

    def __init__(self, targets: int, drafters: int) -> None:
        self.targets, self.drafters = targets, drafters
        self._busy: dict[str, list[float]] = {"prefetch": [], "target": [], "drafter": []}

    def step(self, metrics: StepMetrics) -> None:
        for stage, shares in self._busy.items():
            shares.append(1.0 - metrics.stall[stage])

    def close(self) -> None:
        if len(self._busy["target"]) >= ENOUGH:
            log.info("balance: %s", self._said())

    def _said(self) -> str:
        busy = {stage: median(shares) for stage, shares in self._busy.items()}
        said = (
            f"the target, on {self.targets} GPU(s), worked {busy['target']:.0%} of the time, the "
            f"drafters, on {self.drafters}, {busy['drafter']:.0%}"
        )
        if max(busy["target"], busy["drafter"]) < LIMITS:
            late = busy["prefetch"] >= LIMITS
            return said + ("; both wait for batches: raise --num-prefetch-threads" if late else "")
        targets, times = best_division(self.targets, self.drafters, busy["target"], busy["drafter"])
        gpus = self.targets + self.drafters
        if targets == self.targets:
            return f"{said}; no other division of {gpus} GPUs would be faster"
        return (
            f"{said}; {targets} for the target and {gpus - targets} for the drafters would be "
            f"about {times:.2f} times as fast"
        )


def best_division(
    targets: int, drafters: int, target_busy: float, drafter_busy: float
) -> tuple[int, float]:
    """How many of the same GPUs the target should have, and how much faster that would be."""
    gpus = targets + drafters

    def step(count: int) -> float:
        """What a step would take, in units of today's: the slower stage's part."""
        return max(targets * target_busy / count, drafters * drafter_busy / (gpus - count))

    best = min(range(1, gpus), key=lambda count: (step(count), abs(count - targets)))
    return best, step(targets) / step(best)
