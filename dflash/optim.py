"""AdamW, its schedule, and the step that turns gradients into an update."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash.batches import InputCheck
from dflash.errors import DflashError
from dflash.sections import OptimizerConfig
from dflash.streams import HostCopy


class NonFiniteError(DflashError):
    """A step's loss or gradient is not a number; nothing of it was applied."""

    remedy = "Lower --lr or set --grad-clip, then --resume auto."

    def traced(self, inputs: Iterable[InputCheck], *, targets: int) -> "NonFiniteError":
        """The same error, naming the rows that the target gave no finite features for."""
        culprits = [
            f"target-{check.batch.index % targets} gave no finite features for row(s)"
            f" {', '.join(map(str, rows))} of --data-dir, in micro-batch {check.batch.index}"
            for check in inputs
            if (rows := check.bad_rows())
        ]
        if not culprits:
            return NonFiniteError(f"{self}; the target's features were finite")
        return NonFiniteError(
            f"{self}: {'; '.join(culprits)}",
            remedy="Take these rows out, or try --dtype float32, then --resume auto.",
        )


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then cosine to 0, over `total_steps` optimizer steps."""

    peak_lr: float
    warmup_ratio: float
    total_steps: int

    def lr(self, step: int) -> float:
        """Learning rate of the step numbered `step` from 0."""
        warmup = math.ceil(self.warmup_ratio * self.total_steps)
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.total_steps - warmup)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (betas 0.9, 0.999); weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    # The implementation is named, never left to choose: AdamW asks is_compiling(), and from torch
    # 2.13 on that is true in every thread while any thread compiles (pytorch#184614).
    optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=False, foreach=False)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def apply_step(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    gradients: list[Tensor],
    *,
    divisor: Tensor | float = 1.0,
    lr: float,
    clip: float,
    step: int,
    copies: list[Tensor] | None = None,
) -> float:
    """Divide, clip, update, and return the gradient's norm before clipping.

    On a GPU the update is queued before the host knows the norm, so that the GPU has work while the
    host waits for it.

    Args:
        gradients: of any precision; may be scaled in place.
        copies: the weights in another precision, which follow them.

    Raises NonFiniteError, before any weight changes, when the norm is not finite.
    """
    accurate = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, 2, dtype=accurate)
    norm = torch.linalg.vector_norm(torch.stack(norms)) / divisor
    on_host = HostCopy(norm)
    scale = ((clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)) / divisor
    for group in optimizer.param_groups:
        group["lr"] = lr
    weights: list[Tensor] = list(model.parameters())
    on_gpu = weights[0].is_cuda
    if on_gpu:
        from dflash.update_kernel import adamw  # needs Triton, which comes with CUDA

        unless_bad = torch.where(norm.isfinite(), scale, torch.nan)
        adamw(optimizer, weights, gradients, unless_bad, copies)
    norm_now = on_host.wait().item()
    if not math.isfinite(norm_now):
        raise NonFiniteError(f"step {step + 1}: the gradient's norm is {norm_now}")
    if on_gpu:
        for weight in weights:
            optimizer.state[weight]["step"] += 1
    else:
        _update(optimizer, weights, gradients, scale, copies)
    return norm_now


def _update(
    optimizer: torch.optim.AdamW,
    weights: list[Tensor],
    gradients: list[Tensor],
    scale: Tensor,
    copies: list[Tensor] | None,
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.to(weight.dtype).mul_(scale)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if copies is not None:
        torch._foreach_copy_(copies, [weight.detach() for weight in weights])
