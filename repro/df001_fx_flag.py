"""DF001: a compiled call fails because another thread is tracing with FX.

What happens: a compiled function that is warm, and has worked for hours, raises
`RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function`.

Why: torch up to 2.13 keeps "an FX trace is running" in one process-wide variable
(torch/fx/_symbolic_trace.py, `_is_fx_tracing_flag`). `Tracer.trace` sets it in thread A, and the
entry check of every compiled function, in every thread, reads it (`compile_wrapper` in
torch/_dynamo/eval_frame.py). The compile lock covers neither side.
On 2.13 a trace opened by a *compile* is masked, because a compile sets a process-wide
`is_compiling` that the check looks at too. A trace opened by a program's own
`torch.fx.symbolic_trace`, as here, is not. `--when in-compile` shows the masked one, and with
`--cure own-is-compiling` that it is only masked.

When harmless: never, but rare: the window is a fraction of a second. With
`torch._dynamo.config.error_on_nested_fx_trace = False` the call does not fail: it silently runs
without its compiled code, which this program reports as reproduced.

Cure: shipped, thread-local-flag, or a lock around every step. At start-up alone, also a
gate that holds every thread until all are warm, or compiling on the main thread first. Swapping
the module's class, wrapping sys.modules and locking only first steps do nothing.

Upstream: pytorch#168999 (thread-local in 2.14); reports: #126024, #118260, #136833. Parked like
this it failed in 10 runs of 10 on 2.11 to 2.13, and never on 2.14.1.
"""

from __future__ import annotations

import harness
import schedules
import torch
from torch.fx._symbolic_trace import is_fx_tracing


def reproduce(run: harness.Run) -> harness.Finding:
    backend = harness.CountingBackend()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x_N = torch.ones(4, device=run.device)
    flag_seen: list[bool] = []

    def act() -> bool:
        flag_seen.append(is_fx_tracing())
        return backend.ran(compiled, x_N)

    worker = schedules.beside_trace(run, warm_up=act, act=act)
    failed = harness.raised_in(worker.error) == "compile_wrapper"
    evidence = {"error": harness.described(worker.error), "ran_compiled_code": worker.value}
    if failed:
        return harness.judged(True, "a warm compiled call failed beside a trace", **evidence)
    if worker.error:
        return harness.Finding("cannot tell", "the call failed of something else", evidence)
    if not worker.value:
        reason = "a warm compiled call ran eager, without a word"
        return harness.judged(True, reason, "silent", **evidence)
    if flag_seen[-1]:
        reason = "the call saw another thread's flag, and was spared by the leak of is_compiling()"
        return harness.judged(False, reason, "masked", **evidence)
    return harness.judged(False, "the warm call ran its compiled code", **evidence)


if __name__ == "__main__":
    harness.main("DF001", "fx-flag", __doc__, reproduce)
