"""DF002: two overlapping FX traces leave the tracing flag set for good.

What happens: from some moment on, every compiled call in every thread raises
`RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function`,
although nothing is tracing any more. Only a restart helps.

Why: `Tracer.trace` (torch/fx/_symbolic_trace.py) saves the process-wide flag, sets it, and puts
the saved value back. If A enters, B enters, A leaves, B leaves, then B puts back the True that it
saw while A was tracing. An eager higher-order op (`_set_compilation_env` in
torch/_higher_order_ops/utils.py, entered by eager flex_attention too) saves and restores the same
flag, and leaves it set in the same way, without any other error.

When harmless: where nothing is compiled.

Cure: thread-local-flag, patcher-isolation, or a lock around every step.

Upstream: pytorch#168999 (thread-local in 2.14).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import harness
import schedules
import torch
import torch.fx
from torch._higher_order_ops.utils import _set_compilation_env


def reproduce(run: harness.Run) -> harness.Finding:
    backend = harness.CountingBackend()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x_N = torch.ones(4)
    compiled(x_N)

    def later_call() -> bool:
        with run.cure.step():
            return backend.ran(compiled, x_N)

    def stuck_after(second: Callable[[Callable[[], None]], None], names: str, caller: str) -> bool:
        overlap = schedules.overlapping(run, functools.partial(_trace, run), second, names)
        later = run.start(caller, later_call)
        run.finish()
        raised = {worker.name: harness.described(worker.error) for worker in (*overlap, later)}
        evidence[f"{caller}: errors"] = raised
        evidence[f"{caller}: ran_compiled_code"] = later.value
        return not later.value

    evidence: dict[str, Any] = {}
    stuck_op = stuck_after(_eager_op, "AB", "C")
    stuck_trace = stuck_after(functools.partial(_trace, run), "DE", "F")
    if not (stuck_op or stuck_trace):
        reason = "a compiled call runs its compiled code after the overlapping windows"
        return harness.judged(False, reason, **evidence)
    causes = [name for name, bad in (("op", stuck_op), ("trace", stuck_trace)) if bad]
    reason = f"a compiled call fails, or runs eager, after a trace overlapped: {', '.join(causes)}"
    return harness.judged(True, reason, **evidence)


def _trace(run: harness.Run, inside: Callable[[], None]) -> None:
    torch.fx.symbolic_trace(run.traced(inside))


def _eager_op(inside: Callable[[], None]) -> None:
    """What every eager higher-order op enters."""
    with _set_compilation_env():
        inside()


if __name__ == "__main__":
    harness.main("DF002", "sticky-flag", __doc__, reproduce)
