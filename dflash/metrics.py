"""What a step was like, measured once."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from statistics import median
from typing import Any, Protocol

from dflash.losses import LossSums, Objective


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step over all replicas.

    Attributes:
        loss: ce + kl_weight kl + cap_lambda cap, each normalised over the whole step.
        accuracy: per slot from 1 on, the share of asked slots whose argmax was the label.
        acceptance_length: expected tokens per verification step: 1 + the sum over slots of the
            share that was right together with all slots before it. Measured on this step's blocks,
            with noise and before the update: an estimate; real decoding decides.
        stall: share of this step's time that each stage's threads spent blocked on channels.
        evaluation: tau by replay of held-out documents, how many, and what it took in seconds;
            empty at steps that are not evaluated. Measured after the update.
        queue: items queued between the stages at the step's end, `[queued, capacity]`.
        batches: the micro-batches' checksums, combined in a way that their order does not change.
        loss_ratio: the loss over the median of the steps before it; 1 while there are too few.
        elapsed_s: seconds since the run's directory was opened: loading and saving included.
    """

    step: int
    epoch: int
    lr: float
    grad_norm: float
    noise: float
    tokens: int
    draft_positions: int
    batches: int
    seconds: float
    loss: float
    ce: float
    kl: float
    cap: float
    accuracy: list[float]
    acceptance_length: float
    evaluation: dict[str, float] = field(default_factory=dict)
    stall: dict[str, float] = field(default_factory=dict)
    queue: dict[str, tuple[int, int]] = field(default_factory=dict)
    loss_ratio: float = 1.0
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, sums: LossSums, objective: Objective, **measured: Any) -> "StepMetrics":
        """Metrics from a step's loss sums; `measured` are the remaining fields."""
        weight, correct = float(sums.weight), float(sums.correct_weight)
        ce, kl = float(sums.ce) / weight, float(sums.kl) / weight
        cap = float(sums.entropy) / correct if correct else 0.0
        asked_B = sums.asked_B[1:].clamp(min=1)
        return cls(
            loss=ce + objective.kl_weight * kl + objective.cap_lambda * cap,
            ce=ce,
            kl=kl,
            cap=cap,
            accuracy=(sums.correct_B[1:] / asked_B).tolist(),
            acceptance_length=1.0 + float((sums.prefix_B[1:] / asked_B).sum()),
            **measured,
        )

    @property
    def tokens_per_s(self) -> float:
        """Context tokens trained on per second."""
        return self.tokens / self.seconds

    def line(self, total_steps: int, eta_s: float) -> str:
        """One plain line for a log."""
        parts = "".join(
            f" {name} {value:.3f}" for name, value in (("kl", self.kl), ("cap", self.cap)) if value
        )
        stall = " ".join(f"{stage} {share:.0%}" for stage, share in self.stall.items())
        queue = " ".join(f"{name} {n}/{of}" for name, (n, of) in self.queue.items())
        accuracy = " ".join(f"{share:.0%}" for share in self.accuracy[:4])
        return (
            f"step {self.step}/{total_steps}  loss {self.loss:.3f} (ce {self.ce:.3f}{parts})"
            f"  accept {self.acceptance_length:.2f}  slots {accuracy}  lr {self.lr:.1e}"
            f"  {self.tokens_per_s:.0f} tok/s  stall {stall}  queue {queue}"
            f"  eta {timedelta(seconds=round(eta_s))}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields and tokens_per_s, for JSON."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def with_rates_of(steps: Sequence[StepMetrics]) -> StepMetrics:
    """The last of some steps, but with the tokens, the time and the stalls of all of them.

    Neighbouring steps differ several times in speed, with their batches and with who waits first.
    """
    seconds = sum(step.seconds for step in steps)
    stall = {
        stage: sum(step.stall[stage] * step.seconds for step in steps) / seconds
        for stage in steps[-1].stall
    }
    tokens = sum(step.tokens for step in steps)
    return replace(steps[-1], tokens=tokens, seconds=seconds, stall=stall)


class SpikeGuard:
    """Compares each loss with the median of those before it: reports, and changes nothing."""

    MEMORY = 50  # steps
    ENOUGH = 10  # fewer say nothing about what is usual

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.MEMORY)

    def ratio(self, loss: float) -> float:
        """`loss` over the median of the last steps; 1.0 while there are fewer than ENOUGH."""
        usual = median(self._losses) if len(self._losses) >= self.ENOUGH else 0.0
        self._losses.append(loss)
        return loss / usual if usual else 1.0


class Waits(Protocol):
    """Something that counts the seconds its owner was blocked."""

    @property
    def waited_s(self) -> float: ...


class StallMeter:
    """Share of time that each stage's threads were blocked since it was last asked."""

    def __init__(self, stages: Mapping[str, Sequence[Sequence[Waits]]]) -> None:
        """`stages`: name -> threads -> what each thread waits on."""
        self._stages = stages
        self._last_s = time.monotonic()
        self._waited_s = self._totals()

    def shares(self) -> dict[str, float]:
        """Blocked time over elapsed time, averaged over a stage's threads, 0 to 1."""
        now_s, totals = time.monotonic(), self._totals()
        elapsed_s = now_s - self._last_s
        shares = {
            stage: min(1.0, (totals[stage] - self._waited_s[stage]) / (len(threads) * elapsed_s))
            for stage, threads in self._stages.items()
        }
        self._last_s, self._waited_s = now_s, totals
        return shares

    def _totals(self) -> dict[str, float]:
        return {
            stage: sum(wait.waited_s for thread in threads for wait in thread)
            for stage, threads in self._stages.items()
        }
