"""DF011: Dynamo settings made on the main thread do not hold in other threads.

What happens: `torch._dynamo.config.X = ...` at the top of the program, and a worker thread compiles
with the default of X. Nothing says so.

Why: from 2.12 on, a setting lives in a `contextvars.ContextVar` (torch/utils/_config_module.py),
and a new thread starts with an empty context. The autograd engine's own threads do as well, so a
backward that compiles there sees defaults too. Before 2.12 settings belonged to the process, and
`config.patch` in one thread changed the others.

When harmless: where every thread uses defaults, or sets what it needs itself. Settings taken from
environment variables hold everywhere.

Cure: copy-context (start threads with `contextvars.copy_context().run`), or make the settings in
each thread.

Upstream: pytorch#173568 (2.12), #186537 (the autograd thread).
"""

from __future__ import annotations

import harness
import torch
import torch._dynamo.config as config

SHAPES = 3


def body(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def reproduce(run: harness.Run) -> harness.Finding:
    def act() -> tuple[int, int]:
        return config.recompile_limit, graphs_compiled(run)

    before, config.recompile_limit = config.recompile_limit, 1
    try:
        limit, expected = config.recompile_limit, graphs_compiled(run)
        worker = run.start("T0", act)
        run.finish()
    finally:
        config.recompile_limit = before
    if worker.error:
        reason = f"the thread failed: {harness.described(worker.error)}"
        return harness.Finding("cannot tell", reason)
    limit_seen, graphs = worker.value
    reason = f"recompile_limit is {limit} on the main thread, {limit_seen} in another"
    return harness.judged(
        limit_seen != limit or graphs != expected,
        reason,
        graphs_on_main_thread=expected,
        graphs_in_thread=graphs,
        shapes=SHAPES,
    )


def graphs_compiled(run: harness.Run) -> int:
    """How many graphs a function of its own is compiled to, over a few shapes."""
    function = harness.own_code(body)
    backend = harness.CountingBackend(run.opened)
    compiled = torch.compile(function, backend=backend, dynamic=False)
    for size in range(SHAPES):
        compiled(torch.ones(2 + size))
    return backend.graphs


if __name__ == "__main__":
    harness.main("DF011", "config-in-threads", __doc__, reproduce)
