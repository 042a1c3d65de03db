"""DF010: two threads compile the backward of one compiled function at the same time.

What happens: two threads that share a compiled function each call `backward()` for the first time;
the backward is compiled twice, at the same moment. Seconds or minutes are lost, and the compiler
runs in two threads at once with torch's compile lock free.

Why: the backward graph is compiled lazily. `_AutogradBackwardCompiler.get_or_compile` (before 2.13
inside `_backward_impl`; torch/_functorch/_aot_autograd/runtime_wrappers.py) asks "compiled yet?"
and compiles, with no lock around both. Inductor takes the compile lock inside
(`compile_fx_backward` in torch/_inductor/compile_fx.py), too late for the question; other backends
do not take it at all.

When harmless: where every thread compiles a function of its own, or the first backward is over
before a second thread calls. Results are right either way; time and the lock's promise are lost.

Cure: own-code (a compiled function per thread), non-lazy-backward, or a lock around every step.

Upstream: no report known; read in 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from stage import me
from torch._dynamo.backends.common import aot_autograd


def body(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def reproduce(run: harness.Run) -> harness.Finding:
    shared = Shared(run)
    if run.at_start_up and run.cure.main_thread_first:
        shared.mine()(torch.ones(2, requires_grad=True)).sum().backward()
    first = run.start("A", lambda: shared.act(after=None, beside="B"))
    second = run.start("B", lambda: shared.act(after="A", beside="A"))
    run.finish()
    errors = [harness.described(worker.error) for worker in (first, second) if worker.error]
    functions = len(shared.compiled)
    evidence = {
        "backward_compiles": shared.backward_compiles,
        "compiled_functions": functions,
        "errors": errors,
    }
    if errors:
        return harness.Finding("cannot tell", "a thread failed", evidence)
    reason = f"{shared.backward_compiles} backward compiles of {functions} compiled function(s)"
    return harness.judged(shared.backward_compiles > functions, reason, **evidence)


class Shared:
    """What two threads step: one compiled function, or one each where the cure says so."""

    def __init__(self, run: harness.Run) -> None:
        self.run = run
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.backward_compiles = 0

    def act(self, *, after: str | None, beside: str) -> None:
        """A step whose backward begins when the other thread's forward is over."""
        self.run.first_step()
        if after:
            self.run.stage.wait(f"{after} forward", f"{after} done")
        with self.run.cure.step():
            loss = self.mine()(torch.ones(2, requires_grad=True)).sum()
            self.run.stage.reach(f"{me()} forward")
            self.run.stage.wait(f"{beside} forward", f"{beside} waits", f"{beside} done")
            loss.backward()
            self.run.stage.reach(f"{me()} backward")

    def mine(self) -> Callable[..., Any]:
        owner = me() if self.run.cure.own_code else "both"
        code = harness.own_code(body)
        backend = aot_autograd(fw_compiler=_as_it_is, bw_compiler=self.backward_compiler)
        return self.compiled.setdefault(owner, torch.compile(code, backend=backend))

    def backward_compiler(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        """Compile, and in a backward let the other thread come in meanwhile, if it can."""
        self.run.opened("backward compile")
        self.backward_compiles += 1
        self.run.stage.reach(f"{me()} compiles backward")
        other = "B" if me() == "A" else "A"
        if self.run.stage.reached(f"{other} forward"):  # else this compile is a forward's
            points = (f"{other} compiles backward", f"{other} backward")
            self.run.stage.wait(*points, f"{other} waits", f"{other} done")
        return _as_it_is(graph, _inputs)


def _as_it_is(graph: Any, _inputs: Any) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)


if __name__ == "__main__":
    harness.main("DF010", "backward-compiled-twice", __doc__, reproduce)
