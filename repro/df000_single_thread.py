"""DF000: what works in a single thread fails under a cure (a control, not a failure of torch).

What happens: with a cure installed, one thread alone gets an error or a wrong result from tracing
or compiling.

Why: a cure replaces parts of torch. Giving `torch.fx._symbolic_trace` another class with a property
in the place of the flag, for example, breaks `make_fx(flex_attention)`: eager higher-order ops
write the flag as an attribute, which the property takes, while `Tracer.trace` writes a global.

When harmless: this program must say "absent" without a cure; otherwise nothing can be concluded
about cures here.

Cure: do not install that cure.

Upstream: none; this is about patches of torch, not about torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import harness
import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention


def reproduce(run: harness.Run) -> harness.Finding:
    run.stage.gate_parties = 1
    checks: dict[str, Callable[[harness.Run], bool]] = {
        "symbolic_trace": _traces,
        "torch.compile, forward and backward": _compiles,
        "make_fx(flex_attention)": _traces_flex_attention,
        "a compiled call inside a trace is refused": _refuses_a_nested_call,
    }
    broken = {}
    for name, check in checks.items():
        worker = run.start(name, lambda check=check: _in_a_step(run, check))
        run.finish()
        if worker.error or not worker.value:
            broken[name] = harness.described(worker.error) or "wrong result"
    reason = f"broken in a single thread: {', '.join(broken) or 'nothing'}"
    return harness.judged(bool(broken), reason, broken=broken, checked=list(checks))


def _in_a_step(run: harness.Run, check: Callable[[harness.Run], bool]) -> bool:
    with run.cure.step():
        return check(run)


def _traces(run: harness.Run) -> bool:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(run.device)
    x_BN = torch.ones(2, 4, device=run.device)
    graph = torch.fx.symbolic_trace(module)
    calls = [node.op for node in graph.graph.nodes]
    return calls.count("call_module") == 2 and torch.equal(graph(x_BN), module(x_BN))


def _compiles(run: harness.Run) -> bool:
    module = torch.nn.Linear(4, 4).to(run.device)
    backend = harness.CountingBackend(run.opened)
    compiled = torch.compile(copy.deepcopy(module).forward, backend=backend)
    x_BN = torch.ones(2, 4, device=run.device, requires_grad=True)
    (gradient_BN,) = torch.autograd.grad(compiled(x_BN).sum(), x_BN)
    expected_BN = module.weight.detach().sum(0).expand(2, 4)
    return backend.graphs == 1 and torch.allclose(gradient_BN, expected_BN)


def _traces_flex_attention(run: harness.Run) -> bool:
    q_BHSD = torch.ones(1, 1, 128, 16, device=run.device)
    graph = make_fx(lambda q_BHSD: flex_attention(q_BHSD, q_BHSD, q_BHSD))(q_BHSD)
    return any("flex_attention" in str(node.target) for node in graph.graph.nodes)


def _refuses_a_nested_call(run: harness.Run) -> bool:
    """The error that the failures misuse must still come where it is right."""
    compiled = torch.compile(lambda x: x + 1, backend=harness.CountingBackend(run.opened))
    compiled(torch.ones(2))
    try:
        torch.fx.symbolic_trace(lambda x: compiled(x))
    except RuntimeError as error:
        return harness.raised_in(error) == "compile_wrapper"
    return False


if __name__ == "__main__":
    harness.main("DF000", "single-thread", __doc__, reproduce)
