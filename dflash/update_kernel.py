"""AdamW as one kernel for CUDA: the gradient scaled, moments, weights, and the weights' copy.

What torch does in three passes over the memory (scaling, AdamW, the copy in the target's precision)
and a good deal of work on the host, is one pass here.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def adamw(
    optimizer: torch.optim.AdamW,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    scale: Tensor,
    copies: Sequence[Tensor] | None,
) -> None:
    """Queue the optimizer's step for `scale` times these gradients, and its weights for `copies`.

    The optimizer has the settings and keeps the moments, as its own step would; float32. Who calls
    counts the step. `scale` lies on the GPU; where it is NaN, nothing changes.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        group, state = settings[id(parameter)], optimizer.state[parameter]
        step = int(state["step"]) + 1
        beta1, beta2 = group["betas"]
        count = parameter.numel()
        _update[(triton.cdiv(count, BLOCK),)](
            parameter.data,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            None if copies is None else copies[i],
            count,
            scale,
            beta1,
            beta2,
            group["lr"] / (1 - beta1**step),
            (1 - beta2**step) ** -0.5,
            group["eps"],
            1 - group["lr"] * group["weight_decay"],
            BLOCK=BLOCK,
        )


@triton.jit
def _update(
    weights,
    gradients,
    means,
    squares,
    copies,
    count,
    scale_at,
    beta1,
    beta2,
    rate,
    correction,
    epsilon,
    decay,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_at).to(tl.float32)
    # NaN is not >= 0: then nothing is inside.
    inside = at < tl.where(scale >= 0.0, count, 0)
    gradient = tl.load(gradients + at, mask=inside).to(tl.float32) * scale
    mean = tl.load(means + at, mask=inside)
    mean += (gradient - mean) * (1 - beta1)
    square = tl.load(squares + at, mask=inside) * beta2 + gradient * gradient * (1 - beta2)
    weight = tl.load(weights + at, mask=inside) * decay
    weight -= rate * mean / (tl.sqrt(square) * correction + epsilon)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
    tl.store(weights + at, weight, mask=inside)
    if copies is not None:
        tl.store(copies + at, weight, mask=inside)
