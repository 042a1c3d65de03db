"""DF012: a compile and a backward wait for each other on CUDA's one autograd thread, for ever.

What happens: two threads stand still; nothing is logged and no error comes. One is in
`loss.backward()`, the other in the compile of a flex_attention; GPU and CPU are idle.

Why: autograd has one thread per CUDA device, shared by all Python threads. Thread A's `backward()`
runs there; the first backward of a compiled function is compiled there too, and waits for torch's
compile lock (`compile_fx_backward` in torch/_inductor/compile_fx.py). Thread B holds that lock
while it traces flex_attention (`create_fw_bw_graph` in
torch/_higher_order_ops/flex_attention.py), and asks `torch.autograd.grad` for the derivative of the
score function, on fake CUDA tensors: that is queued on the same autograd thread, behind A.

When harmless: on the CPU, where a backward runs in the thread that calls it; with one drafter per
device; or where every forward and backward was compiled before a second thread starts.

Cure: own-thread-backward (`torch.autograd.set_multithreading_enabled(False)` around the backward),
or non-lazy-backward. A patch of the tracing flag does not touch it.

Upstream: no report known. Seen on 2.11 on an H200; the code is the same in 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import harness
import torch
from stage import Missed
from torch.nn.attention.flex_attention import flex_attention

# An attribute access would find the operator of the same name.
flex_module = importlib.import_module("torch._higher_order_ops.flex_attention")
HANG_S = 20.0  # the rest of both compiles takes about 5 s
LOCK_AWAITED = "compile_lock awaited"


def reproduce(run: harness.Run) -> harness.Finding:
    harness.needs_cuda(run)
    run.stage.deadline_s = harness.CUDA_DEADLINE_S
    compiled = torch.compile(lambda x: x.sin() + 1)
    x_N = torch.ones(64, device="cuda", requires_grad=True)

    def backward_in_a() -> None:
        with run.cure.step():
            loss = compiled(x_N).sum()
        run.stage.reach("A forward")
        run.stage.wait("B inside", "B done")
        with run.cure.step():
            loss.backward()
        torch.cuda.synchronize()

    def compile_in_b() -> None:
        run.stage.wait("A forward", "A done")
        q_BHSD = torch.randn(1, 1, 128, 64, device="cuda", requires_grad=True)
        with run.cure.step():
            torch.compile(flex_attention)(q_BHSD, q_BHSD, q_BHSD)
        torch.cuda.synchronize()

    inside = functools.partial(_wait_inside, run)
    before = flex_module.create_fw_bw_graph
    flex_module.create_fw_bw_graph = _first_calling(inside, before)
    try:
        a, b = run.start("A", backward_in_a), run.start("B", compile_in_b)
        run.stage.wait(LOCK_AWAITED, "A done", "B done")
        run.finish(within_s=HANG_S)
    except Missed:
        if not (a.is_alive() and b.is_alive() and run.stage.reached(LOCK_AWAITED)):
            raise
        return harness.judged(True, "A's backward and B's compile wait for each other", **_stacks())
    finally:
        flex_module.create_fw_bw_graph = before
    errors = [harness.described(worker.error) for worker in (a, b) if worker.error]
    if errors:
        return harness.Finding("cannot tell", "a thread failed", {"errors": errors})
    return harness.judged(False, "the backward and the compile both ended")


def _wait_inside(run: harness.Run) -> None:
    """In B, which holds the compile lock: let A's backward come as far as it gets."""
    run.opened("create_fw_bw_graph")
    run.stage.reach("B inside")
    run.stage.wait(LOCK_AWAITED, "A waits", "A done")  # "A waits": a cure keeps its backward away


def _first_calling(inside: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        inside()
        return then(*args, **kwargs)

    return wrapped


def _stacks() -> dict[str, Any]:
    """The innermost frames of every thread that runs Python, the autograd thread among them."""
    stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
    return {"stacks": [[f"{at.name} {at.filename}:{at.lineno}" for at in s[-8:]] for s in stacks]}


if __name__ == "__main__":
    harness.main("DF012", "autograd-thread-deadlock", __doc__, reproduce)
