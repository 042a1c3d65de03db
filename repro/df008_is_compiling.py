"""DF008: while one thread compiles, `torch.compiler.is_compiling()` is True in every thread.

What happens: eager code that asks takes its compile-time path: an eager optimizer in another
thread computes its step in another way, and its parameters come out slightly different.

Why: from 2.13 on, a compile holds a process-wide flag for its whole length
(`_compile_session_context` in torch/compiler/__init__.py, entered in torch/_dynamo/convert_frame.py
`compile_inner`). `torch/optim` asks it in many places, among them `_get_value`, which then keeps
the step number as a tensor.

When harmless: where nothing that runs beside a compile asks. Where it does ask, results depend on
when a neighbour compiles. On 2.13 the leak also masks a part of DF001, so that curing it alone
brings DF001 back.

Cure: own-is-compiling (only together with thread-local-flag), or a lock around every step.

Upstream: pytorch#184614 (2.13). AdamW beside a compile: 1.7e-6 apart after a few steps on CPU.
"""

from __future__ import annotations

import harness
import schedules
import torch

STEPS = 8


def reproduce(run: harness.Run) -> harness.Finding:
    def act() -> tuple[bool, dict[str, torch.Tensor]]:
        return torch.compiler.is_compiling(), adamw_both_ways()

    alone = adamw_both_ways()
    worker = schedules.beside_compile(run, act)
    if worker.error:
        reason = f"the optimizer failed: {harness.described(worker.error)}"
        return harness.Finding("cannot tell", reason)
    leaks, beside = worker.value
    apart = {name: float((alone[name] - beside[name]).abs().max()) for name in alone}
    reason = f"is_compiling() is {leaks} in a thread that compiles nothing"
    differs = any(apart.values())
    return harness.judged(leaks or differs, reason, is_compiling=leaks, adamw_apart=apart)


def adamw_both_ways() -> dict[str, torch.Tensor]:
    return {"foreach": adamw(foreach=True), "for_loop": adamw(foreach=False)}


def adamw(*, foreach: bool) -> torch.Tensor:
    """The parameters after some steps from a fixed start, by the eager optimizer."""
    start_N = torch.linspace(-1, 1, 1000)
    parameter_N = torch.nn.Parameter(start_N.clone())
    optimizer = torch.optim.AdamW([parameter_N], lr=1e-3, foreach=foreach)
    for step in range(STEPS):
        parameter_N.grad = torch.sin(start_N * (step + 1))
        optimizer.step()
    return parameter_N.detach()


if __name__ == "__main__":
    harness.main("DF008", "is-compiling-leak", __doc__, reproduce)
