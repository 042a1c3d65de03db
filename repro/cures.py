"""Every cure that has been proposed, by name: those that hold, and those that do nothing.

A cure is installed for a whole run (`installed`), or stands around each step of a thread (`step`),
or changes how the program is written (the flags). `shipped` is what `dflash train` does; its parts
come from `dflash`, the others are here for the table only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
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
    captures_itself: ClassVar[bool] = False
    settles_first: ClassVar[bool] = False

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Flags(threading.local):
    fx_tracing = False


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


def dflash_module(module: str) -> Any:
    """A module of the `dflash` beside these files, in a checkout or in the installed package.

    Found by its place: z-lab's wheel owns the import name too, and another environment's Python
    that runs these files need not have either.
    """
    if "dflash" not in sys.modules:
        places = [folder / "dflash" for folder in Path(__file__).resolve().parents[1:3]]
        folder = next(place for place in places if (place / "fx_isolation.py").is_file())
        spec = importlib.util.spec_from_file_location(
            "dflash", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["dflash"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["dflash"])
    return importlib.import_module(f"dflash.{module}")


class _Isolated(Cure):
    """Parts of dflash's isolation, whether this torch needs them or not."""

    parts: ClassVar[tuple[str, ...]] = ()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        isolation = dflash_module("fx_isolation")
        with ExitStack() as undo:
            # A torch that lacks the name has nothing of that kind to isolate.
            with contextlib.suppress(isolation.MissingName):
                for part in self.parts:
                    getattr(isolation, part)(undo)
            yield


class ThreadLocalFlag(_Isolated):
    name = "thread-local-flag"
    summary = "c: the tracing flag read and written per thread: modes 1 and 2"
    parts = ("isolate_flag",)


class PatcherIsolation(_Isolated):
    name = "patcher-isolation"
    summary = "c2: c, traces one at a time, FX's class patches active in their thread: modes 1-5"
    parts = ("isolate_flag", "isolate_patchers")


class ThreadLocalIsCompiling(_Isolated):
    name = "own-is-compiling"
    summary = "k: is_compiling() per thread: mode 8; alone it unmasks mode 1"
    parts = ("isolate_is_compiling",)


class OwnThreadBackward(Cure):
    name = "own-thread-backward"
    summary = "the backward, and its lazy compile, on the thread that calls it: mode 12"

    def step(self) -> AbstractContextManager[None]:
        return dflash_module("compile").backward_on_this_thread()


class NonLazyBackward(Cure):
    name = "non-lazy-backward"
    summary = "the backward compiled with the forward, under the same lock: modes 10 and 12"

    def step(self) -> AbstractContextManager[None]:
        config = importlib.import_module("torch._functorch.config")
        return _attribute(config, "force_non_lazy_backward_lowering", True)


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
                self.stage.meet()


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


class SettingsFirst(Cure):
    name = "settings-first"
    summary = "the process's settings are made before the threads start: mode 7"
    settles_first = True


class OwnCapture(Cure):
    name = "own-capture"
    summary = "each thread captures its CUDA graph itself, thread-locally: mode 13"
    captures_itself = True


class Shipped(OwnThreadBackward):
    name = "shipped"
    summary = "what `dflash train` does: the isolation this torch needs, and the six below"
    private_generator = True
    own_code = True
    copies_context = True
    captures_itself = True
    settles_first = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        isolation = dflash_module("compile").install_thread_isolation()
        try:
            yield
        finally:
            isolation.remove()


_ALL: tuple[type[Cure], ...] = (
    *(Cure, Shipped, OwnThreadBackward, PrivateGenerator, OwnCode, CopyContext, OwnCapture),
    *(SettingsFirst, ThreadLocalFlag, PatcherIsolation, ThreadLocalIsCompiling, NonLazyBackward),
    *(ModuleClassSwap, SysModulesWrapper, LockFirstStep, LockEveryStep, ConfigFlag, GateOnly),
    MainThreadFirst,
)
CURES: dict[str, type[Cure]] = {cure.name: cure for cure in _ALL}
