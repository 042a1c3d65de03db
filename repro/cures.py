"""Every cure that has been proposed, by name: those that hold, and those that do nothing.

A cure is installed for a whole run (`installed`), or stands around each step of a thread (`step`),
or changes how the program is written (the flags). None of them is meant for production.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from stage import Stage

FX = "torch.fx._symbolic_trace"  # torch.fx shows a function of the module's own name in places
FLAG = "_is_fx_tracing_flag"


class Cure:
    """Nothing: the control."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no cure"
    private_generator: ClassVar[bool] = False
    copies_context: ClassVar[bool] = False
    own_code: ClassVar[bool] = False
    main_thread_first: ClassVar[bool] = False

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Flags(threading.local):
    fx_tracing = False
    compiling = False


def _property_class(base: type, flags: _Flags) -> type:
    def read(_module: Any) -> bool:
        return flags.fx_tracing

    def write(_module: Any, value: bool) -> None:
        flags.fx_tracing = value

    return type("FlagModule", (base,), {FLAG: property(read, write)})


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class ModuleClassSwap(Cure):
    name = "module-class-swap"
    summary = "a: property on the module's class; Tracer.trace writes a global, past it: no-op"

    def installed(self) -> AbstractContextManager[None]:
        module = importlib.import_module(FX)
        return _attribute(module, "__class__", _property_class(types.ModuleType, _Flags()))


class SysModulesWrapper(Cure):
    name = "sys-modules-wrapper"
    summary = "b: another object in sys.modules; torch's functions keep their globals: no-op"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        module = importlib.import_module(FX)
        wrapper = _property_class(types.ModuleType, _Flags())(FX)
        wrapper.__dict__.update({k: v for k, v in vars(module).items() if k != FLAG})
        sys.modules[FX] = wrapper
        try:
            with _attribute(sys.modules["torch.fx"], "_symbolic_trace", wrapper):
                yield
        finally:
            sys.modules[FX] = module


# The readers' new bodies: run with the globals of torch's module, where they find the flags.
def _is_fx_tracing() -> bool:
    is_fx_tracing_warning()  # type: ignore[name-defined]  # noqa: F821
    return _repro_flags.fx_tracing  # type: ignore[name-defined]  # noqa: F821


def _is_fx_symbolic_tracing() -> bool:
    return _repro_flags.fx_tracing and not torch.compiler.is_compiling()  # type: ignore  # noqa: F821


def _is_compiling() -> bool:
    if torch.jit.is_scripting():  # type: ignore[name-defined]  # noqa: F821
        return False
    return _repro_flags.compiling or _is_compiling_flag  # type: ignore[name-defined]  # noqa: F821


class ThreadLocalFlag(Cure):
    name = "thread-local-flag"
    summary = "c: the tracing flag read and written per thread: modes 1 and 2"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        module, flags = importlib.import_module(FX), _Flags()
        trace = self.around_trace(_flag_around(module.Tracer.trace, flags))
        vars(module)["_repro_flags"] = flags
        with contextlib.ExitStack() as stack:
            stack.callback(vars(module).pop, "_repro_flags")
            for owner, name, value in (
                # In place: compile_wrapper's closures hold these very functions.
                (module.is_fx_tracing, "__code__", _is_fx_tracing.__code__),
                (module.is_fx_symbolic_tracing, "__code__", _is_fx_symbolic_tracing.__code__),
                (module, "__class__", _property_class(type(module), flags)),
                (module.Tracer, "trace", trace),
            ):
                stack.enter_context(_attribute(owner, name, value))
            stack.enter_context(self.more(module))
            yield

    def around_trace(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        return trace

    def more(self, _module: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _flag_around(trace: Callable[..., Any], flags: _Flags) -> Callable[..., Any]:
    @functools.wraps(trace)
    def flagged(*args: Any, **kwargs: Any) -> Any:
        with _attribute(flags, "fx_tracing", True):
            return trace(*args, **kwargs)

    return flagged


class PatcherIsolation(ThreadLocalFlag):
    name = "patcher-isolation"
    summary = "c2: c, traces one at a time, FX's class patches active in their thread: modes 1-5"

    def around_trace(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo.convert_frame import compile_lock

        @functools.wraps(trace)
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self.stage.holding(compile_lock):
                return trace(*args, **kwargs)

        return alone

    def more(self, module: Any) -> AbstractContextManager[None]:
        patch_method = module._Patcher.patch_method

        @functools.wraps(patch_method)
        def owned_patch(
            patcher: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True
        ) -> None:
            patch_method(patcher, cls, name, _owned(new, getattr(cls, name)), deduplicate)

        return _attribute(module._Patcher, "patch_method", owned_patch)


def _owned(new: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    owner = threading.get_ident()

    @functools.wraps(new)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == owner else before)(*args, **kwargs)

    return chosen


class ThreadLocalIsCompiling(Cure):
    name = "thread-local-is-compiling"
    summary = "k: is_compiling() per thread: mode 8; alone it unmasks mode 1"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        import torch.compiler as module

        if not hasattr(module, "_compile_session_context"):
            yield  # this torch sets no process-wide flag during a compile
            return
        flags = _Flags()
        vars(module)["_repro_flags"] = flags
        session = functools.partial(_attribute, flags, "compiling", True)
        try:
            with (
                _attribute(module.is_compiling, "__code__", _is_compiling.__code__),
                _attribute(module, "_compile_session_context", session),
            ):
                yield
        finally:
            del vars(module)["_repro_flags"]


class LockFirstStep(Cure):
    name = "lock-first-step"
    summary = "d: each thread's first step under one lock; warm threads are outside it: no-op"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._stepped: set[str] = set()  # by name: an ident is reused once its thread has ended

    def _is_first(self) -> bool:
        thread = threading.current_thread().name
        first = thread not in self._stepped
        self._stepped.add(thread)
        return first

    def step(self) -> AbstractContextManager[None]:
        return self.stage.hold() if self._is_first() else nullcontext()


class LockEveryStep(Cure):
    name = "lock-every-step"
    summary = "every step under one lock: holds, and serialises everything"

    def step(self) -> AbstractContextManager[None]:
        return self.stage.hold()


class ConfigFlag(Cure):
    name = "config-flag"
    summary = "e: error_on_nested_fx_trace=False in every thread: silent eager, and the flag sticks"

    def installed(self) -> AbstractContextManager[None]:
        return self.step()

    def step(self) -> AbstractContextManager[None]:
        import torch._dynamo.config as config

        return _attribute(config, "error_on_nested_fx_trace", False)


class GateOnly(LockFirstStep):
    name = "gate-only"
    summary = "f: everyone waits after the first step until all are warm: start-up only"

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        first = self._is_first()
        try:
            yield
        finally:  # a thread that failed comes too: its neighbours are not left waiting
            if first:
                self.stage.meet(parties=2)


class MainThreadFirst(Cure):
    name = "main-thread-first"
    summary = "g: compile on the main thread before the threads start: start-up only"
    main_thread_first = True


class PrivateGenerator(Cure):
    name = "private-generator"
    summary = "each thread draws from its own torch.Generator: mode 6"
    private_generator = True


class OwnCode(Cure):
    name = "own-code"
    summary = "each thread compiles its own copy of the code object: mode 9"
    own_code = True


class CopyContext(Cure):
    name = "copy-context"
    summary = "threads run in a copy of the main thread's contextvars context: mode 11"
    copies_context = True


_ALL: tuple[type[Cure], ...] = (
    *(Cure, ModuleClassSwap, SysModulesWrapper, ThreadLocalFlag, PatcherIsolation, LockFirstStep),
    *(LockEveryStep, ConfigFlag, GateOnly, MainThreadFirst, ThreadLocalIsCompiling),
    *(PrivateGenerator, OwnCode, CopyContext),
)
CURES: dict[str, type[Cure]] = {cure.name: cure for cure in _ALL}
