"""Concurrent tracing: each failure shown without the isolation, gone with it, back without it.

What breaks torch on purpose runs as a cell: one child process imports torch and forks for each, so
that nothing is left behind here. Threads are parked at events with a deadline.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import filelock
import pytest
import torch
from torch.fx import _symbolic_trace

from dflash import compile as compile_module
from dflash import fx_probe
from dflash.compile import IsolationError, backward_on_this_thread, install_thread_isolation
from dflash.fx_isolation import MissingName, isolate_is_compiling
from dflash.fx_probe import Finding, State, ThreadProbe, probe_threads

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cells(tmp_path_factory, worker_id):
    """What every cell saw: `cells["warm_call"]["installed"]`. One child for all test processes."""
    base = tmp_path_factory.getbasetemp()
    answer = (base if worker_id == "master" else base.parent) / "compile-cells.json"
    with filelock.FileLock(f"{answer}.lock"):
        if not answer.exists():
            answer.write_text(run_cells())
    return json.loads(answer.read_text())


def run_cells():
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, __file__],
        # A fork cannot use CUDA that its parent has begun to use, as Dynamo does unasked.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * DEADLINE_S,
    )
    assert child.returncode == 0, child.stderr
    answer = child.stdout.splitlines()[-1]
    assert "Died" not in answer, f"{answer}\n{child.stderr}"
    return answer


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    monkeypatch.setattr(compile_module, "_current", None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# What a cell answers when nothing went wrong.
FINE = {
    "warm_call": {"call": "ok"},
    "eager_module": {"call": "ok", "trace": "ok", "nodes": ["x", "add", "output"]},
    "overlapping_traces": {
        "first": "ok",
        "second": "ok",
        "module call": "as before",
        "flag": False,
        "warm call": "ok",
    },
    "eager_op_beside_a_trace": {"flag": False, "warm call": "ok"},
    "trace_in_a_compile": {"call": "ok"},
    "is_compiling_elsewhere": {"elsewhere": False},
}
# What is bad about it, in a torch that has the failure.
BAD = {
    "warm_call": lambda seen: seen["call"].startswith("RuntimeError: Detected that you are using"),
    "eager_module": lambda seen: seen["call"].startswith("NameError: module is not installed"),
    "overlapping_traces": lambda seen: (
        seen["second"].startswith("AssertionError: CURRENT_PATCHER is None")
        and seen["module call"] == "patched"
    ),
    "eager_op_beside_a_trace": lambda seen: seen["flag"] and seen["warm call"] != "ok",
    "trace_in_a_compile": lambda seen: seen["call"].startswith("RuntimeError: Detected that you"),
    "is_compiling_elsewhere": lambda seen: seen["elsewhere"],
}


@pytest.mark.parametrize("cure", ["none", "removed"])
@pytest.mark.parametrize("cell", FINE)
def test_without_the_isolation_the_failure_is_there(cells, cell, cure):
    seen = cells[cell][cure]
    if seen == FINE[cell]:
        pytest.skip(f"measured: torch {torch.__version__} does not show {cell} by itself")
    assert BAD[cell](seen), seen


@pytest.mark.parametrize("cell", FINE)
def test_with_the_isolation_the_failure_is_gone(cells, cell):
    assert cells[cell]["installed"] == FINE[cell]


def test_is_compiling_alone_unmasks_the_flag(cells):
    """Why it is made thread-local together with the flag only; and that this cell can fail."""
    found = cells["what_is_replaced"]["none"]["found"]
    if (found["fx_flag"], found["is_compiling"]) != ("leaks", "leaks"):
        pytest.skip(f"measured: torch {torch.__version__} masks nothing: {found}")
    assert BAD["trace_in_a_compile"](cells["half_of_it"]["half"])


def test_some_failure_is_shown_or_the_probe_finds_none(cells):
    """The tests above prove nothing in a run in which every control was skipped."""
    shown = [cell for cell in FINE if cells[cell]["none"] != FINE[cell]]
    found = cells["what_is_replaced"]["none"]["found"]
    assert bool(shown) == ("leaks" in found.values()), (shown, found)


def test_what_is_needed_is_installed_once_and_put_back(cells):
    seen = cells["what_is_replaced"]["none"]
    assert seen["installed"] == [name for name, state in seen["found"].items() if state == "leaks"]
    assert seen["second install is the first"]
    assert set(seen["then"].values()) == {"isolated"}
    assert bool(seen["replaced"]) == bool(seen["installed"])
    assert seen["not put back"] == []
    assert seen["found again"] == seen["found"]


def test_a_warm_function_stays_warm(cells):
    assert cells["compiles_of_a_warm_function"]["none"] == {"before": 1, "after": 1}


def test_one_thread_gets_the_same_results(cells):
    seen = cells["one_thread"]["none"]
    assert seen["installed"] == seen["none"] == seen["removed"]
    assert "flex_attention" in seen["none"]["make_fx of flex_attention"]


def probe_result(**states):
    findings = {name: Finding(State.ISOLATED, "said the test") for name in fx_names()}
    findings |= {name: Finding(state, "said the test") for name, state in states.items()}
    return ThreadProbe(**findings)


def fx_names():
    return [field.name for field in dataclasses.fields(ThreadProbe)]


@pytest.fixture
def cures(monkeypatch):
    """Cures that only note that they were installed and undone."""
    notes = []

    def cure(name):
        def install(undo):
            notes.append(f"+{name}")
            undo.callback(notes.append, f"-{name}")

        return install

    monkeypatch.setattr(compile_module, "_CURES", {name: cure(name) for name in fx_names()})
    return notes


def test_where_nothing_leaks_nothing_is_replaced(caplog):
    before = replaceable()
    with caplog.at_level(logging.INFO, logger="dflash.compile"):
        isolation = install_thread_isolation(probe_result)
    assert isolation.installed == ()
    assert not differing(before, replaceable())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "nothing replaced" in record.getMessage()
    isolation.remove()
    assert not differing(before, replaceable())


def test_only_what_leaks_is_replaced_and_the_log_line_says_so(cures, caplog):
    probes = iter([probe_result(patchers=State.LEAKS), probe_result()])
    with caplog.at_level(logging.INFO, logger="dflash.compile"):
        isolation = install_thread_isolation(lambda: next(probes))
        assert install_thread_isolation(lambda: next(probes)) is isolation
    assert cures == ["+patchers"]
    (record,) = caplog.records
    assert "nn.Module leaks (said the test), made thread-local" in record.getMessage()
    assert "is_compiling() isolated (said the test)" in record.getMessage()
    isolation.remove()
    isolation.remove()
    assert cures == ["+patchers", "-patchers"]


def test_what_cannot_be_told_is_a_warning_and_is_left_alone(cures, caplog):
    probes = iter([probe_result(fx_flag=State.UNKNOWN, is_compiling=State.LEAKS)])
    isolation = install_thread_isolation(lambda: next(probes))
    assert isolation.installed == ()
    assert cures == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "FX tracing flag cannot tell (said the test)" in record.getMessage()


@pytest.mark.parametrize("state", [State.LEAKS, State.UNKNOWN])
def test_a_cure_that_does_not_take_is_undone_and_an_error(cures, state):
    probes = iter([probe_result(fx_flag=State.LEAKS), probe_result(fx_flag=state)])
    with pytest.raises(
        IsolationError, match="FX tracing flag, made thread-local, is then"
    ) as error:
        install_thread_isolation(lambda: next(probes))
    assert error.value.remedy
    assert cures == ["+fx_flag", "-fx_flag"]


def test_a_leak_that_has_nothing_to_replace_is_an_error_that_names_it(cures, monkeypatch):
    def install(undo):
        raise MissingName("torch.fx.gone")

    monkeypatch.setitem(compile_module._CURES, "patchers", install)
    leaks = probe_result(fx_flag=State.LEAKS, patchers=State.LEAKS)
    with pytest.raises(IsolationError, match=r"no torch\.fx\.gone"):
        install_thread_isolation(lambda: leaks)
    assert cures == ["+fx_flag", "-fx_flag"]


def test_a_torch_without_a_name_is_cannot_tell_with_the_name(monkeypatch):
    monkeypatch.delattr(_symbolic_trace, "is_fx_symbolic_tracing")
    monkeypatch.delattr(_symbolic_trace, "_maybe_revert_all_patches")
    found = [
        fx_probe._found(p, DEADLINE_S) for p in (fx_probe._probe_flag, fx_probe._probe_patchers)
    ]
    assert [finding.state for finding in found] == [State.UNKNOWN] * 2
    assert "torch.fx._symbolic_trace.is_fx_symbolic_tracing" in found[0].why
    assert "torch.fx._symbolic_trace._maybe_revert_all_patches" in found[1].why


def test_a_probe_that_does_not_end_is_cannot_tell():
    never = threading.Event()
    finding = fx_probe._found(lambda _: never.wait(DEADLINE_S), deadline_s=0.01)
    never.set()
    assert finding == Finding(State.UNKNOWN, "a thread of the probe was not done after 0.01 s")


def test_a_compile_that_is_switched_off_is_cannot_tell():
    with torch.compiler.set_stance("force_eager"):
        finding = fx_probe._found(fx_probe._probe_is_compiling, DEADLINE_S)
    assert finding.state is State.UNKNOWN
    assert "compiled nothing" in finding.why


def test_backward_on_this_thread_sets_it_for_this_thread_only():
    enabled = torch._C._is_multithreading_enabled
    assert enabled()
    with backward_on_this_thread():
        assert not enabled()
        assert fx_probe._in_thread(enabled, DEADLINE_S)
        weight = torch.ones(2, requires_grad=True)
        torch.compile(torch.square, backend="aot_eager")(weight).sum().backward()
        assert weight.grad.tolist() == [2.0, 2.0]
    assert enabled()


@pytest.mark.gpu
def test_backward_on_this_thread_runs_in_the_calling_thread_on_cuda():
    ran_in = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ran_in.append(threading.get_ident())
            return grad

    weight = torch.ones(2, device="cuda", requires_grad=True)
    Note.apply(weight).sum().backward()
    assert ran_in != [threading.get_ident()]  # the control
    with backward_on_this_thread():
        Note.apply(weight).sum().backward()
    assert ran_in[1] == threading.get_ident()


# The cells, run in forks of the child process.


def warm_call():
    """Mode 1: a warm compiled function is called while another thread traces."""
    warm = warm_function()
    with parked(lambda park: torch.fx.symbolic_trace(park)):
        return {"call": outcome(warm)}


def eager_module():
    """Mode 3: an eager module is called while another thread traces."""
    module = torch.nn.Linear(2, 2)
    with parked(lambda park: torch.fx.symbolic_trace(park)) as trace:
        call = outcome(lambda: module(torch.ones(2)))
    nodes = [node.name for node in trace.result.graph.nodes] if trace.result else []
    return {"call": call, "trace": trace.outcome, "nodes": nodes}


def overlapping_traces():
    """Modes 2 and 4: two traces, of which the first one ends first."""
    warm, call_before = warm_function(), torch.nn.Module.__call__
    with parked(lambda park: torch.fx.symbolic_trace(park)) as first:
        second = Parked(lambda park: torch.fx.symbolic_trace(park))
        second.start()
        # With the isolation the second one waits for the lock that the first one owns.
        first_of(second.reached, LOCK.contended)
        first.finish()
        second.wait_until_reached()
    second.finish()
    return {
        "first": first.outcome,
        "second": second.outcome,
        "module call": "as before" if torch.nn.Module.__call__ is call_before else "patched",
        "flag": _symbolic_trace.is_fx_symbolic_tracing(),
        "warm call": outcome(warm),
    }


def eager_op_beside_a_trace():
    """Mode 2: an eager higher-order op begins in a trace of another thread and ends after it."""
    from torch._higher_order_ops.utils import _set_compilation_env

    warm = warm_function()
    with parked(lambda park: torch.fx.symbolic_trace(park)) as trace, _set_compilation_env():
        trace.finish()
    return {"flag": _symbolic_trace.is_fx_symbolic_tracing(), "warm call": outcome(warm)}


def trace_in_a_compile():
    """Mode 1 by a compile: hidden in a torch where `is_compiling()` leaks."""
    warm = warm_function()

    def compile_with_a_trace(park):
        def backend(graph, _):
            torch.fx.symbolic_trace(park)
            return graph.forward

        torch.compile(lambda x: x - 1, backend=backend)(torch.ones(2))

    with parked(compile_with_a_trace):
        return {"call": outcome(warm)}


def is_compiling_elsewhere():
    """Mode 8: is this thread compiling, when another one is?"""

    def compile_and_park(park):
        def backend(graph, _):
            park(torch.ones(2))
            return graph.forward

        torch.compile(lambda x: x - 1, backend=backend)(torch.ones(2))

    with parked(compile_and_park):
        return {"elsewhere": torch.compiler.is_compiling()}


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
    install_thread_isolation()
    warm(torch.ones(2))
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
    return {name: getattr(probe, name).state for name in fx_names()}


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


class Parked(threading.Thread):
    """A thread that runs `work(module)`, which stops where the module is called."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.work, self.result, self.outcome = work, None, "not done"
        self.reached, self.leave = threading.Event(), threading.Event()

    def run(self):
        self.outcome = outcome(self.trace)
        self.reached.set()

    def trace(self):
        self.result = self.work(Park(self.stop))

    def stop(self):
        self.reached.set()
        assert self.leave.wait(DEADLINE_S), "the other side did not finish"

    def wait_until_reached(self):
        assert self.reached.wait(DEADLINE_S), "the park was not reached"

    def finish(self):
        self.leave.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()


class Park(torch.nn.Module):
    def __init__(self, stop):
        super().__init__()
        self.stop = stop

    def forward(self, x):
        self.stop()
        return x + 1


@contextlib.contextmanager
def parked(work):
    """That thread, at its stop; it goes on when the block is left."""
    thread = Parked(work)
    thread.start()
    thread.wait_until_reached()
    try:
        yield thread
    finally:
        thread.finish()


class ContendedLock:
    """A re-entrant lock that tells when somebody had to wait for it."""

    def __init__(self):
        self.lock = threading.RLock()
        self.contended = threading.Event()

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.contended.set()
            assert self.lock.acquire(timeout=DEADLINE_S)

    def __exit__(self, *error):
        self.lock.release()


LOCK = ContendedLock()


def first_of(*events):
    """Wait until one of the events is set."""
    either = threading.Event()
    for event in events:
        threading.Thread(
            target=lambda e=event: e.wait(DEADLINE_S) and either.set(), daemon=True
        ).start()
    assert either.wait(DEADLINE_S)


def warm_function():
    warm = torch.compile(lambda x: x * 2, backend="eager")
    warm(torch.ones(2))
    return lambda: warm(torch.ones(2))


def outcome(call):
    """`ok`, or the error of the call."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "ok"


def run_cells_at_once(pairs):
    """What each cell answers under its cure, every one in a fork of this process."""
    started = [start_cell(cell, cure) for cell, cure in pairs]
    seen = {}
    for (cell, cure), (pid, reading) in zip(pairs, started, strict=True):
        with open(reading) as answer:
            text = answer.read()
        _, status = os.waitpid(pid, 0)
        seen.setdefault(cell.__name__, {})[cure] = json.loads(text) if text else {"Died": status}
    return seen


def start_cell(cell, cure):
    """The process id of the fork and where to read what it answers."""
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, reading
    faulthandler.dump_traceback_later(2 * DEADLINE_S, exit=True)
    try:
        torch._dynamo.reset()
        apply(cure)
        os.write(writing, json.dumps(cell()).encode())
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def apply(cure):
    if cure == "half":
        isolate_is_compiling(contextlib.ExitStack())
    elif cure != "none":
        isolation = install_thread_isolation()
        if cure == "removed":
            isolation.remove()


def main():
    from torch._dynamo import convert_frame

    convert_frame.compile_lock = LOCK
    warm_function()  # what Dynamo sets up once is then in every fork
    gc.freeze()  # a collection in a fork would copy every page
    seen = {}
    for cell in FINE:
        pairs = [(globals()[cell], cure) for cure in ("none", "installed", "removed")]
        seen |= run_cells_at_once(pairs)
    others = (what_is_replaced, compiles_of_a_warm_function, one_thread)
    seen |= run_cells_at_once([(cell, "none") for cell in others])
    if seen["what_is_replaced"]["none"]["found"]["is_compiling"] == "leaks":
        seen["half_of_it"] = run_cells_at_once([(trace_in_a_compile, "half")])["trace_in_a_compile"]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
