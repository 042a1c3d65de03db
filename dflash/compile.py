"""`torch.compile` in several threads: measure what leaks between them, and stop just that.

torch up to 2.13 keeps "FX is tracing" in a process-wide flag, every torch so far patches
`nn.Module.__call__` for all threads while one traces, and from 2.13 on `is_compiling()` is true in
threads that compile nothing. So a trace in one thread breaks compiled calls, eager modules and
other traces elsewhere (pytorch#126024, #168042), or silently gives a wrong graph. Which of these a
torch has is measured, never derived from its version: 2.13 merely masks one by another.

The patch does not cover the default random generators, which a compile rewinds under other
threads (pytorch#198247): give each thread its own `torch.Generator`.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import Parameter

from dflash.errors import DflashError
from dflash.fx_isolation import (
    MissingName,
    isolate_flag,
    isolate_is_compiling,
    isolate_patchers,
    isolate_settings,
)
from dflash.fx_probe import State, ThreadProbe, probe_threads

log = logging.getLogger(__name__)


class IsolationError(DflashError):
    """Threads that compile disturb each other in this torch, and the cure did not take."""

    remedy = (
        "Train with one drafter, or install a torch this cure was measured on (2.11 to 2.14); "
        "report the message above."
    )


class Isolation:
    """What was found and replaced; `remove` puts every replaced object back."""

    def __init__(self, found: ThreadProbe, installed: tuple[str, ...], undo: ExitStack) -> None:
        self.found = found
        self.installed = installed
        self._undo = undo

    def remove(self) -> None:
        """Restore torch, failures included; call it while no thread traces or compiles."""
        global _current
        with _install_lock:
            self._undo.close()
            if _current is self:
                _current = None


# What is replaced for each finding, in this order: `is_compiling` needs the flag isolated.
_CURES: dict[str, Callable[[ExitStack], None]] = {
    "fx_flag": isolate_flag,
    "patchers": isolate_patchers,
    "is_compiling": isolate_is_compiling,
    "settings": isolate_settings,
}
_WHAT = {
    "fx_flag": "FX tracing flag",
    "patchers": "FX patches of nn.Module",
    "is_compiling": "is_compiling()",
    "settings": "settings of dynamic=",
}
_install_lock = threading.Lock()
_current: Isolation | None = None


def install_thread_isolation(probe: Callable[[], ThreadProbe] = probe_threads) -> Isolation:
    """Keep tracing and compiling in one thread from disturbing the others; see `ThreadProbe`.

    Installs what the probe says is needed and nothing else, and probes again. Call it before
    threads start. A second call returns the first one's answer. Traces are serialised with
    compiles by torch's own compile lock, so a traced function must not wait for another thread
    that compiles. With CUDA, use `backward_on_this_thread` as well, or that lock deadlocks.

    Raises:
        IsolationError: something leaks and cannot be replaced in this torch, or still leaks.
    """
    global _current
    keep_stand_in_guard()
    with _install_lock:
        if _current is None:
            _current = _install(probe)
            told = all(getattr(_current.found, name).state is not State.UNKNOWN for name in _CURES)
            log.log(logging.INFO if told else logging.WARNING, "%s", _summary(_current))
        return _current


def keep_stand_in_guard() -> None:
    """Let the first compile leave nothing behind that dies with its thread.

    Where torch is built for CUDA and sees no device, a compile puts a stand-in in the place of
    CUDA's device guard, for the whole process, and yet the first thread that does so owns it: when
    that thread has ended, the next compile crashes (DF014). Hence the main thread should be first:
    call this there. Elsewhere it does nothing.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None:
        ensure()


@contextmanager
def backward_on_this_thread() -> Iterator[None]:
    """Run `backward()` in the calling thread instead of autograd's thread for the device.

    Around the backward of a compiled function, on CUDA, where several threads compile. There the
    first backward compiles too, and by default on the one autograd thread that all Python threads
    share: it waits for the compile lock, whose owner, tracing flex_attention, waits for
    `torch.autograd.grad` on that very thread. Neither ever moves. Besides, the thread's own
    Dynamo settings hold in that compile (pytorch#186537). The setting is the thread's own.
    """
    with torch.autograd.set_multithreading_enabled(False):
        yield


def let_backwards_run_twice() -> None:
    """From now on, what this thread compiles keeps all that a second backward needs.

    A compiled backward may overwrite what its forward saved. That it must not is noticed where the
    first backward retains its graph, but not where the code comes from a cache that a run without
    that has filled: then it is an error, and with the setting alone the overwriting code could be
    taken. Hence a key of its own in the caches as well. Every backward reads the setting: it stays.
    """
    torch._functorch.config.donated_buffer = False
    torch.compiler.config.cache_key_tag = "backwards run twice"


def keep_less_for_backward() -> None:
    """From now on, what this thread compiles computes cheap things again instead of keeping them.

    The share of what could be kept is of torch's own measure. At 0.7 a layer of Qwen3-8B's drafter
    keeps matrix products and little else: less memory in no more time (docs/performance.md).
    """
    torch._functorch.config.activation_memory_budget = 0.7


class LateCompile(DflashError):
    """Something would be compiled after the start, while other threads run."""

    remedy = (
        "Please report it with the run's log; --late-compile allow compiles it, which is safe but "
        "holds the other drafters up, and --compile none compiles nothing."
    )


class Seal:
    """Ends one thread's compiling: once closed, a compile raises LateCompile.

    With `allow_late` it is done all the same, and logged: threads are isolated, so that it is slow
    and not wrong. With `instead` that is called, and the graph runs as it was traced.
    """

    def __init__(self, *, allow_late: bool, instead: Callable[[str], object] | None = None) -> None:
        self.allow_late, self.instead = allow_late, instead
        self.closed = False

    def close(self) -> None:
        """From now on nothing is expected to be compiled."""
        self.closed = True

    def backend(self, name: str) -> Callable[..., Any]:
        """The backend of torch.compile so named, under this seal."""
        compile_graph: Callable[..., Any] = torch._dynamo.lookup_backend(name)

        def sealed(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            if self.closed and not self._compiles_late(inputs):
                return graph.forward
            return compile_graph(graph, inputs)

        return sealed

    def _compiles_late(self, inputs: list[Any]) -> bool:
        given = (i for i in inputs if isinstance(i, torch.Tensor))
        shapes = ", ".join(str(tuple(i.shape)) for i in given if not isinstance(i, Parameter))
        what = f"a compile after the start, for tensors of shape {shapes}"
        if self.allow_late:
            log.warning("%s; the other threads may wait for it", what)
        elif self.instead is None:
            raise LateCompile(what)
        else:
            self.instead(what)
        return self.allow_late


def compiled_for_this_thread(
    function: Callable[..., Any], backend: Callable[..., Any] | str, *, dynamic: bool = False
) -> Callable[..., Any]:
    """`torch.compile` of a copy of `function` that no other thread uses.

    With one code object for all, threads share Dynamo's recompile limit, and a backward may be
    compiled in two of them at once. Whatever would run eager is an error. Raises LateCompile when
    the backend's seal is closed.

    Args:
        dynamic: one graph for all sizes of more than 1, instead of one for each.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    compiled = torch.compile(own, backend=backend, dynamic=dynamic, fullgraph=True)

    @functools.wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        try:
            return compiled(*args, **named)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, LateCompile):
                raise error.inner_exception from None
            raise

    return called


def _install(probe: Callable[[], ThreadProbe]) -> Isolation:
    found = probe()
    needed = _needed(found)
    with ExitStack() as undo:
        for name in needed:
            try:
                _CURES[name](undo)
            except MissingName as error:
                raise IsolationError(
                    f"torch {torch.__version__}: {_WHAT[name]} {getattr(found, name)}, "
                    f"and there is no {error} to replace"
                ) from error
        if needed:
            _verify(probe(), needed)
        return Isolation(found, needed, undo.pop_all())


def _needed(found: ThreadProbe) -> tuple[str, ...]:
    """What leaks; `is_compiling` only where the flag does not need to be masked by it."""
    leaking = [name for name in _CURES if getattr(found, name).state is State.LEAKS]
    if found.fx_flag.state is State.UNKNOWN and "is_compiling" in leaking:
        leaking.remove("is_compiling")
    return tuple(leaking)


def _verify(after: ThreadProbe, needed: tuple[str, ...]) -> None:
    for name in needed:
        finding = getattr(after, name)
        if finding.state is not State.ISOLATED:
            raise IsolationError(
                f"torch {torch.__version__}: {_WHAT[name]}, made thread-local, is then: {finding}"
            )


def _summary(isolation: Isolation) -> str:
    """What was done about each, in few words; why is told only of what nothing was done about."""
    kinds: dict[str, list[str]] = {"made thread-local": [], "isolated by torch": []}
    others = []
    for name, what in _WHAT.items():
        finding = getattr(isolation.found, name)
        if name in isolation.installed:
            kinds["made thread-local"].append(what)
        elif finding.state is State.ISOLATED:
            kinds["isolated by torch"].append(what)
        else:
            others.append(f"{what}: {finding}")
    done = [f"{', '.join(whats)}: {kind}" for kind, whats in kinds.items() if whats]
    return f"threads that compile, torch {torch.__version__}: {'; '.join(done + others)}"
