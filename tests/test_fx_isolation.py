"""The isolation inside torch: what it replaces, puts back, and leaves as it was for one thread.

Which failures it cures is in tests/repro. Here a child process is changed, so that nothing is left
behind in this one.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import _symbolic_trace

from dflash.compile import install_thread_isolation
from dflash.fx_probe import ThreadProbe, probe_threads

DEADLINE_S = 180.0
PROBED = [field.name for field in dataclasses.fields(ThreadProbe)]


@pytest.fixture(scope="module")
def seen():
    """What each function below answers, in a process of its own."""
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def test_what_is_needed_is_installed_once_and_put_back(seen):
    replaced = seen["what_is_replaced"]
    leaking = [name for name, state in replaced["found"].items() if state == "leaks"]
    assert replaced["installed"] == leaking
    assert replaced["second install is the first"]
    assert set(replaced["then"].values()) == {"isolated"}
    assert bool(replaced["replaced"]) == bool(replaced["installed"])
    assert replaced["not put back"] == []
    assert replaced["found again"] == replaced["found"]


def test_a_warm_function_stays_warm(seen):
    assert seen["compiles_of_a_warm_function"] == {"before": 1, "after": 1}


def test_one_thread_gets_the_same_results(seen):
    work = seen["one_thread"]
    assert work["installed"] == work["none"] == work["removed"]
    assert "flex_attention" in work["none"]["make_fx of flex_attention"]


def compiles_of_a_warm_function():
    """An installation does not send compiled functions back to the compiler."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU())
    warm = torch.compile(module, backend=backend)
    warm(torch.ones(2))
    before = len(graphs)
    isolation = install_thread_isolation()
    warm(torch.ones(2))
    isolation.remove()
    return {"before": before, "after": len(graphs)}


def one_thread():
    """The same work without the isolation, with it, and after its removal."""
    seen = {"none": work_of_one_thread()}
    isolation = install_thread_isolation()
    seen["installed"] = work_of_one_thread()
    isolation.remove()
    return seen | {"removed": work_of_one_thread()}


def work_of_one_thread():
    """What torch does in one thread: compile, trace, export, TorchScript."""
    torch._dynamo.reset()
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 3)
    torch.compile(module, backend="aot_eager", fullgraph=True)(x).sum().backward()
    q = torch.randn(1, 1, 16, 8)
    return {
        "gradients": [p.grad.tolist() for p in module.parameters()],
        "symbolic_trace": torch.fx.symbolic_trace(module).code,
        "make_fx": make_fx(torch.func.grad(lambda x: module(x).sum()))(x).code,
        "make_fx of flex_attention": make_fx(lambda q: flex_attention(q, q, q))(q).code,
        "export": torch.export.export(module, (x,), strict=False).graph_module.code,
        "strict export": torch.export.export(module, (x,), strict=True).graph_module.code,
        "script": torch.jit.script(scripted)(x[0, :2]).tolist(),
        "compiled is_compiling": torch.compile(scripted, backend="eager")(x[0, :2]).tolist(),
        "leftovers": [torch.compiler.is_compiling(), _symbolic_trace.is_fx_symbolic_tracing()],
    }


def scripted(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x + 1
    return x - 1


def what_is_replaced():
    """Installation and removal, object by object."""
    before = replaceable()
    isolation = install_thread_isolation()
    again = install_thread_isolation()
    during, then = replaceable(), states(probe_threads())
    isolation.remove()
    return {
        "found": states(isolation.found),
        "installed": isolation.installed,
        "second install is the first": again is isolation,
        "then": then,
        "replaced": differing(before, during),
        "not put back": differing(before, replaceable()),
        "found again": states(probe_threads()),
    }


def states(probe):
    return {name: getattr(probe, name).state for name in PROBED}


def replaceable():
    """Every object that may be replaced: what both modules and their classes hold, and code."""
    held = {}
    for module in (_symbolic_trace, torch.compiler):
        held[f"class of {module.__name__}"] = type(module)
        for name, value in vars(module).items():
            held[f"{module.__name__}.{name}"] = value
            function = getattr(value, "__wrapped__", value)
            held[f"code of {module.__name__}.{name}"] = getattr(function, "__code__", None)
    for cls in (torch.fx.Tracer, _symbolic_trace._Patcher):
        held |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items()}
    return held


def differing(before, after):
    """Names whose object is another one, or there on one side only."""
    return [n for n in sorted(before.keys() | after.keys()) if before.get(n) is not after.get(n)]


def main():
    torch.compile(scripted, backend="eager")(torch.ones(2))  # Dynamo wraps Tracer.trace once
    functions = (what_is_replaced, compiles_of_a_warm_function, one_thread)
    print(json.dumps({function.__name__: function() for function in functions}))


if __name__ == "__main__":
    main()
