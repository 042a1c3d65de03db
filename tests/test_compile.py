"""What is installed for what a probe found, what is said about it, and the backward's thread."""

import dataclasses
import logging
import threading

import pytest
import torch
from torch.fx import _symbolic_trace

from dflash import compile as compile_module
from dflash import fx_probe
from dflash.compile import (
    IsolationError,
    LateCompile,
    Seal,
    backward_on_this_thread,
    compiled_for_this_thread,
    install_thread_isolation,
)
from dflash.fx_isolation import MissingName
from dflash.fx_probe import Finding, State, ThreadProbe

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    monkeypatch.setattr(compile_module, "_current", None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
    tracer = dict(vars(torch.fx.Tracer))
    with caplog.at_level(logging.INFO, logger="dflash.compile"):
        isolation = install_thread_isolation(probe_result)
    assert isolation.installed == ()
    assert dict(vars(torch.fx.Tracer)) == tracer
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("is_compiling(), settings of dynamic=: isolated by torch")
    isolation.remove()


def test_only_what_leaks_is_replaced_and_the_log_line_says_so(cures, caplog):
    probes = iter([probe_result(patchers=State.LEAKS), probe_result()])
    with caplog.at_level(logging.INFO, logger="dflash.compile"):
        isolation = install_thread_isolation(lambda: next(probes))
        assert install_thread_isolation(lambda: next(probes)) is isolation
    assert cures == ["+patchers"]
    (record,) = caplog.records
    assert "FX patches of nn.Module: made thread-local; FX tracing flag, " in record.getMessage()
    assert record.getMessage().endswith("is_compiling(), settings of dynamic=: isolated by torch")
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
    assert "FX tracing flag: cannot tell (said the test)" in record.getMessage()
    assert "is_compiling(): leaks (said the test)" in record.getMessage()


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


def test_the_stand_in_of_the_device_guard_is_made_before_anything_is_probed(monkeypatch):
    """By the caller, the main thread: see repro/df014_guard_of_an_ended_thread.py."""
    happened = []

    def ensure():
        happened.append(threading.current_thread())

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", ensure, raising=False)

    def probe():
        happened.append("probe")
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        install_thread_isolation(probe)
    assert happened == [threading.main_thread(), "probe"]


def scale(x):
    return x * len(x)


def test_each_compiled_copy_has_a_recompile_limit_of_its_own():
    """More copies than the limit allows variants of one function: none falls back to eager."""
    limit = torch._dynamo.config.recompile_limit
    copies = [compiled_for_this_thread(scale, "eager") for _ in range(limit + 2)]
    assert [copy(torch.ones(3)).sum().item() for copy in copies] == [9.0] * (limit + 2)


def test_what_would_run_eager_is_an_error():
    def breaks(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_for_this_thread(breaks, "eager")(torch.ones(2))


@pytest.fixture
def late():
    """(seal, a compiled function that has met one size)."""

    def make(*, allow_late):
        seal = Seal(allow_late=allow_late)
        compiled = compiled_for_this_thread(scale, seal.backend("eager"))
        assert compiled(torch.ones(3)).tolist() == [3.0] * 3
        seal.close()
        return compiled

    return make


def test_a_late_compile_is_refused_with_the_shapes(late):
    compiled = late(allow_late=False)
    with pytest.raises(
        LateCompile, match=r"a compile after the start, for .* shape \(5,\)"
    ) as error:
        compiled(torch.ones(5))
    assert "--late-compile allow" in error.value.remedy
    assert compiled(torch.ones(3)).tolist() == [3.0] * 3


def test_where_it_is_allowed_a_late_compile_is_logged(late, caplog):
    assert late(allow_late=True)(torch.ones(5)).tolist() == [5.0] * 5
    assert "a compile after the start, for tensors of shape (5,)" in caplog.text


def test_other_errors_of_a_backend_stay_what_they_are():
    def broken(_graph, _inputs):
        raise ValueError("no such instruction")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"):
        compiled_for_this_thread(scale, broken)(torch.ones(3))
