"""DF015: one thread's `torch.compile(dynamic=...)` decides how another thread compiles.

What happens: while a thread is in a call that it compiled with `dynamic=False`, a function that
another thread compiles without `dynamic` gets a graph for each size, up to the recompile limit,
and from then on runs eager. The other way round, with `dynamic=True`, sizes are symbolic that
should be static. Where two such calls overlap, the setting stays after both. Nothing says so.

Why: `dynamic` is kept in Dynamo's settings, `automatic_dynamic_shapes` and
`assume_static_by_default`, from the beginning of every call to its end, warm ones too
(`make_set_enable_dynamic` in torch/_dynamo/eval_frame.py). Before 2.12 settings belong to the
process.

When harmless: where all threads compile with the same `dynamic`, or on 2.12 and later (see DF011).

Cure: shipped (those two settings per thread), or a lock around every step.

Upstream: pytorch#173568 (2.12) made settings a context's own. Measured on 2.11.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import schedules
import torch

SHAPES = 3


def body(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def reproduce(run: harness.Run) -> harness.Finding:
    def call_in_a(inside: schedules.Inside) -> None:
        def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
            def running(*inputs: Any) -> Any:
                run.opened("call")
                inside()
                return graph.forward(*inputs)

            return running

        torch.compile(lambda x: x + 1, backend=backend, dynamic=False)(torch.ones(2))

    expected = graphs_compiled("alone")
    worker = schedules.beside(run, call_in_a, schedules.nothing, lambda: graphs_compiled("beside"))
    if worker.error:
        reason = f"the thread failed: {harness.described(worker.error)}"
        return harness.Finding("cannot tell", reason)
    reason = f"{worker.value} graphs for {SHAPES} sizes, {expected} if nobody else is in a call"
    return harness.judged(worker.value != expected, reason, alone=expected, beside=worker.value)


def graphs_compiled(name: str) -> int:
    """How many graphs a function of that name is compiled to, over a few sizes, by default."""
    backend = harness.CountingBackend()
    compiled = torch.compile(harness.own_code(body, name), backend=backend)
    for size in range(SHAPES):
        compiled(torch.ones(2 + size))
    return backend.graphs


if __name__ == "__main__":
    harness.main("DF015", "settings-of-a-call", __doc__, reproduce)
