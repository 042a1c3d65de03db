"""What one thread's tracing or compiling does to another thread, measured in the installed torch.

Each probe parks a trace or a compile by waiting, inside it, for a second thread that looks round;
every wait has a deadline. What cannot be told says why, and is never taken for "isolated".
"""

import dataclasses
import enum
import functools
import logging
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from dflash.fx_isolation import OF_DYNAMIC, MissingName, find

log = logging.getLogger(__name__)

T = TypeVar("T")


class State(enum.StrEnum):
    LEAKS = "leaks"
    ISOLATED = "isolated"
    UNKNOWN = "cannot tell"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What another thread saw, or why that cannot be told."""

    state: State
    why: str

    def __str__(self) -> str:
        return f"{self.state} ({self.why})"


@dataclasses.dataclass(frozen=True)
class ThreadProbe:
    """What one thread's tracing or compiling does to another thread, in the installed torch."""

    fx_flag: Finding
    patchers: Finding
    is_compiling: Finding
    settings: Finding


def probe_threads(deadline_s: float = 60.0) -> ThreadProbe:
    """Trace and compile a trifle in one thread and look on from another.

    Takes about 0.1 s once Dynamo is imported. Call it before threads draw from the default
    generators: the small compile rewinds those.

    Args:
        deadline_s: how long either thread may take before the answer is "cannot tell".
    """
    return ThreadProbe(
        fx_flag=_found(_probe_flag, deadline_s),
        patchers=_found(_probe_patchers, deadline_s),
        is_compiling=_found(_probe_is_compiling, deadline_s),
        settings=_found(_probe_settings, deadline_s),
    )


def _found(probe: Callable[[float], Finding], deadline_s: float) -> Finding:
    """The answer of one probe; a missing name or a wait that ends is "cannot tell"."""
    try:
        return _in_thread(functools.partial(probe, deadline_s), deadline_s)
    except MissingName as error:
        return Finding(State.UNKNOWN, f"this torch has no {error}")
    except TimeoutError as error:
        return Finding(State.UNKNOWN, str(error))
    except Exception as error:
        log.debug("a probe of torch's thread isolation failed", exc_info=True)
        said = str(error).partition("\n")[0]
        return Finding(State.UNKNOWN, f"the probe failed: {type(error).__name__}: {said}")


def _in_thread(call: Callable[[], T], deadline_s: float) -> T:
    """`call()` in a fresh thread; raises what it raises, or TimeoutError after the deadline."""
    answer: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            answer.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="dflash-probe", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if failure:
        raise failure[0]
    if not answer:
        raise TimeoutError(f"a thread of the probe was not done after {deadline_s:g} s")
    return answer[0]


class _Park(torch.nn.Module):
    """A module that stops at `meanwhile` while it is traced."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def forward(self, x: Any) -> Any:
        self.meanwhile()
        return x


def _probe_flag(deadline_s: float) -> Finding:
    """Trace here; is the flag up in another thread?"""
    symbolic = find("torch.fx._symbolic_trace", "is_fx_symbolic_tracing")
    seen: dict[str, bool] = {}

    def meanwhile() -> None:
        seen["here"] = symbolic()
        seen["there"] = _in_thread(symbolic, deadline_s)
        seen["masked"] = _in_thread(torch.compiler.is_compiling, deadline_s)

    torch.fx.Tracer().trace(_Park(meanwhile))
    if seen["there"]:
        return Finding(State.LEAKS, "another thread sees a trace that is not its own")
    if seen["masked"] or not seen["here"]:
        return Finding(State.UNKNOWN, "a compile elsewhere masks the flag; probe before it starts")
    return Finding(State.ISOLATED, "another thread does not see a trace")


def _probe_patchers(deadline_s: float) -> Finding:
    """Trace here; does a module called in another thread end up in this trace?"""
    revert = find("torch.fx._symbolic_trace", "_maybe_revert_all_patches")
    caught: list[int] = []
    reverted: list[bool] = []

    class Watching(torch.fx.Tracer):
        def call_module(self, *args: Any, **kwargs: Any) -> Any:
            caught.append(threading.get_ident())
            return super().call_module(*args, **kwargs)

    def as_a_compile_does() -> bool:
        patched = torch.nn.Module.__call__
        with revert():
            return torch.nn.Module.__call__ is not patched

    def meanwhile() -> None:
        _in_thread(_call_a_module, deadline_s)
        reverted.append(_in_thread(as_a_compile_does, deadline_s))

    Watching().trace(_Park(meanwhile))
    if caught:
        return Finding(State.LEAKS, "a module called in another thread is taken into the trace")
    if reverted[0]:
        return Finding(State.LEAKS, "a compile in another thread undoes the patches of a trace")
    return Finding(State.ISOLATED, "a module called in another thread runs as usual")


def _call_a_module() -> bool:
    """Call an eager module; False where the trace of another thread made that fail."""
    try:
        torch.nn.Identity()(None)
    except NameError:  # "module is not installed as a submodule": the tracer has noted the call
        return False
    return True


def _probe_is_compiling(deadline_s: float) -> Finding:
    """Compile here; is `is_compiling()` true in another thread?"""
    seen: dict[str, bool] = {}

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        seen["here"] = torch.compiler.is_compiling()
        seen["there"] = _in_thread(torch.compiler.is_compiling, deadline_s)
        return graph.forward

    torch.compile(_fresh(_double), backend=backend)(torch.ones(1))
    if not seen:
        return Finding(State.UNKNOWN, "torch.compile compiled nothing: is it disabled?")
    if seen["there"]:
        return Finding(State.LEAKS, "true in a thread that compiles nothing")
    if not seen["here"]:
        return Finding(State.ISOLATED, "a compile does not set it outside the traced code")
    return Finding(State.ISOLATED, "true in the compiling thread only")


def _probe_settings(deadline_s: float) -> Finding:
    """Be in a call that was compiled with `dynamic=False`; does that hold in another thread?"""
    seen: dict[str, list[Any]] = {}

    def look() -> list[Any]:
        return [find("torch._dynamo.config", name) for name in OF_DYNAMIC]

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def running(*inputs: Any) -> Any:
            seen["here"], seen["there"] = look(), _in_thread(look, deadline_s)
            return graph.forward(*inputs)

        return running

    before = look()
    torch.compile(_fresh(_double), backend=backend, dynamic=False)(torch.ones(1))
    if not seen:
        return Finding(State.UNKNOWN, "torch.compile compiled nothing: is it disabled?")
    if seen["there"] != before:
        return Finding(State.LEAKS, "a thread's call decides how another thread compiles")
    if seen["here"] == before:
        return Finding(State.UNKNOWN, "a call does not change the settings: were they changed?")
    return Finding(State.ISOLATED, "a call's settings hold in its thread only")


def _fresh(function: Callable[..., T]) -> Callable[..., T]:
    """With a code object of its own, or the next probe would find this one compiled."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), globals())


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
