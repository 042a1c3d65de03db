"""DF003: an eager nn.Module fails because another thread is tracing with FX.

What happens: a thread that compiles nothing calls a plain module and gets
`NameError: module is not installed as a submodule`. A target model's thread dies of it while
drafters compile.

Why: for the length of a trace, `Tracer.trace` (torch/fx/_symbolic_trace.py) replaces
`torch.nn.Module.__call__` and `__getattr__` for the whole process. The eager call lands in the
tracer of the other thread, which looks for the module in its own root (`path_of_module`). The
first Inductor compile opens such a window by itself: `InterpreterShim._dummy_gm` in
torch/_inductor/loop_body.py calls `torch.fx.symbolic_trace`, as this program does.

When harmless: where every thread that calls modules has a warmed-up neighbourhood: no first
compile and no trace at all while it runs.

Cure: patcher-isolation, or a lock around every step. A thread-local flag is not enough.

Upstream: pytorch#187589 (not in 2.14). Seen on 2.11 to 2.14, on CPU and on CUDA.
"""

from __future__ import annotations

import harness
import schedules
import torch


def reproduce(run: harness.Run) -> harness.Finding:
    module = torch.nn.Linear(4, 4)
    x_BN = torch.ones(2, 4)
    expected_BN = module(x_BN)
    worker = schedules.beside_trace(run, lambda: module(x_BN), lambda: module(x_BN))
    caught = harness.raised_in(worker.error) == "path_of_module"
    evidence = {"error": harness.described(worker.error)}
    if caught:
        return harness.judged(True, "an eager module was called into another's trace", **evidence)
    if worker.error:
        return harness.Finding("cannot tell", "the module failed of something else", evidence)
    same = torch.equal(worker.value, expected_BN)
    reason = "the eager module computed what it should" if same else "a wrong result, silently"
    return harness.judged(not same, reason, **evidence)


if __name__ == "__main__":
    harness.main("DF003", "eager-module", __doc__, reproduce)
