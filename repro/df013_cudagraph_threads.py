"""DF013: `mode="reduce-overhead"` fails in a thread other than the one that warmed it up.

What happens: a compiled function that ran on the main thread gets a new shape in a worker thread
and dies of an AssertionError in `get_obj` (torch/_inductor/cudagraph_trees.py). With the per-thread
initialisation added by hand, outputs are "overwritten by a subsequent run" instead, because the
count of generations belongs to the process.

Why: CUDA-graph trees keep their manager in thread-local storage, which is set up in the importing
thread and in autograd's threads only (up to 2.12).

When harmless: where one thread compiles and runs everything.

Cure: own-capture: each thread captures forward and backward itself, on its own stream, with
`torch.cuda.graph(..., capture_error_mode="thread_local")`; bit-exact on an H200. A neighbour that
draws from the default CUDA generator during the capture dies all the same: private generators.

Upstream: pytorch#184357 (2.13: initialised on demand, capture under a lock).
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch


def reproduce(run: harness.Run) -> harness.Finding:
    harness.needs_cuda(run)
    run.stage.deadline_s = harness.CUDA_DEADLINE_S
    act = _captured if run.cure.captures_itself else _warmed_on_the_main_thread()
    worker = run.start("A", lambda: [act(run, size) for size in (96, 160)])
    run.finish()
    evidence = {"error": harness.described(worker.error)}
    if harness.raised_in(worker.error) == "get_obj":
        return harness.judged(True, "a thread has no CUDA-graph manager", **evidence)
    if worker.error:
        return harness.judged(True, "the graph failed in a thread", **evidence)
    right = all(worker.value)
    return harness.judged(not right, f"the graphs' results are right: {right}", **evidence)


def body(x_N: torch.Tensor) -> torch.Tensor:
    return torch.sin(x_N) * 2 + 1


def _warmed_on_the_main_thread() -> Callable[[harness.Run, int], bool]:
    compiled = torch.compile(body, mode="reduce-overhead", dynamic=False)

    def result_of(x_N: torch.Tensor) -> torch.Tensor:
        for _ in range(3):  # warm up, record, replay
            torch.compiler.cudagraph_mark_step_begin()
            result_N = compiled(x_N).clone()
        return result_N

    def act(run: harness.Run, size: int) -> bool:
        run.opened("compile")
        x_N = torch.linspace(0, 1, size, device="cuda")
        return torch.allclose(result_of(x_N), body(x_N))

    result_of(torch.ones(64, device="cuda"))
    return act


def _captured(run: harness.Run, size: int) -> bool:
    run.opened("capture")
    x_N = torch.linspace(0, 1, size, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body(x_N)  # what the first call sets up must not be captured
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result_N = body(x_N)
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(result_N, body(x_N))


if __name__ == "__main__":
    harness.main("DF013", "cudagraph-threads", __doc__, reproduce)
