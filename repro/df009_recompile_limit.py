"""DF009: threads share one recompile limit, and the late ones silently run eager.

What happens: of many threads that compile the same function for their own shapes, the first eight
run compiled code. The others run eager: right, slow, and with no error.

Why: Dynamo counts cache entries per code object (`exceeds_recompile_limit` in
torch/_dynamo/cache_size.py, `torch._dynamo.config.recompile_limit`, 8 by default), and a code
object belongs to the process. Every thread and every `torch.compile` of the same function add to
the same count.

When harmless: with fewer variants, all threads together, than the limit; or with `fullgraph=True`,
which makes it an error. A log line on the first time is all there is otherwise.

Cure: own-code (a copy of the code object per thread), marking shapes dynamic, or a higher limit,
set in every thread (DF011).

Upstream: of 12 threads, 8 compiled and 4 ran eager.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch

THREADS = 12


def body(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def reproduce(run: harness.Run) -> harness.Finding:
    backend = harness.CountingBackend(run.opened)

    def thread(index: int) -> Callable[[], bool]:
        def act() -> bool:
            if index:
                run.stage.wait(f"T{index - 1} acted", f"T{index - 1} done")
            with run.cure.step():
                compiled = torch.compile(_function(run), backend=backend, dynamic=False)
                try:
                    return backend.ran(compiled, torch.ones(2 + index))
                finally:
                    run.stage.reach(f"T{index} acted")

        return act

    workers = [run.start(f"T{index}", thread(index)) for index in range(THREADS)]
    run.finish()
    errors = [harness.described(worker.error) for worker in workers if worker.error]
    eager = sum(worker.value is False for worker in workers)
    evidence = {"threads": THREADS, "compiled": backend.graphs, "eager": eager, "errors": errors}
    if errors:
        return harness.Finding("cannot tell", "a thread failed", evidence)
    return harness.judged(eager > 0, f"{eager} of {THREADS} threads ran eager", **evidence)


def _function(run: harness.Run) -> Callable[[torch.Tensor], torch.Tensor]:
    if not run.cure.own_code:
        return body
    return harness.own_code(body)


if __name__ == "__main__":
    harness.main("DF009", "shared-recompile-limit", __doc__, reproduce)
