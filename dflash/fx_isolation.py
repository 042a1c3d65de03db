"""What `dflash.compile` replaces inside torch so that tracing and compiling stay in their thread.

Each `isolate_*` pushes what puts the old state back onto an `ExitStack`, so that a half-done
installation and `Isolation.remove` undo the same way. A name that this torch lacks is a
`MissingName`; nothing is derived from a version.

Functions are changed through their `__code__`, not rebound: `torch.compile` captures
`is_fx_symbolic_tracing` when it wraps, other modules hold `is_compiling` by `from ... import`, and
both keep the function object. Code so transplanted runs with the globals of the module it lands in,
therefore it may use only what exists there, which includes `_dflash_local` below.
"""

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch

OF_DYNAMIC = ("automatic_dynamic_shapes", "assume_static_by_default")
"""The settings of Dynamo behind `torch.compile(dynamic=...)`."""


class _Local(threading.local):
    """The state of one thread; the class attributes are what a new thread starts with."""

    tracing = False
    compiling = False
    patcher: Any = None

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}


_dflash_local = _Local()


class MissingName(Exception):
    """This torch has no attribute of that name, so there is nothing to look at or to replace."""


def find(module: str, path: str) -> Any:
    """The object at `path` in `module`; raises `MissingName` with the whole name."""
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise MissingName(f"{module}.{path}") from error


def isolate_flag(undo: ExitStack) -> None:
    """Give each thread its own `_is_fx_tracing_flag` (modes 1 and 2)."""
    symbolic_trace = importlib.import_module("torch.fx._symbolic_trace")
    readers = {"is_fx_tracing": _is_fx_tracing, "is_fx_symbolic_tracing": _is_fx_symbolic_tracing}
    found = {name: find(symbolic_trace.__name__, name) for name in readers}
    find(symbolic_trace.__name__, "_is_fx_tracing_flag")
    _lend_local(symbolic_trace, undo)
    _thread_local_attribute(symbolic_trace, "_is_fx_tracing_flag", "tracing", undo)
    # Before the readers: a trace that begins now must be seen by its own thread.
    _wrap_trace(_tracing_in_its_thread, undo)
    for name, reader in readers.items():
        _swap_code(found[name], reader, undo)


def isolate_patchers(undo: ExitStack) -> None:
    """Keep a trace's `Module.__call__` in its thread; one trace at a time (modes 3 to 5)."""
    symbolic_trace = importlib.import_module("torch.fx._symbolic_trace")
    lock = find("torch._dynamo.convert_frame", "compile_lock")
    managers = {"_new_patcher": _new_patcher, "_maybe_revert_all_patches": _revert_own_patches}
    found = {name: find(symbolic_trace.__name__, f"{name}.__wrapped__") for name in managers}
    patcher_class = find(symbolic_trace.__name__, "_Patcher")
    patch_method = find(symbolic_trace.__name__, "_Patcher.patch_method")
    _lend_local(symbolic_trace, undo)
    for name, manager in managers.items():
        _swap_code(found[name], manager, undo)
    _rebind(patcher_class, "patch_method", _patching_own_thread(patch_method), undo)
    _wrap_trace(functools.partial(_tracing_under, lock), undo)


def isolate_is_compiling(undo: ExitStack) -> None:
    """Give each thread its own `torch.compiler.is_compiling()` (mode 8).

    Only where the FX flag is a thread's own: `is_fx_symbolic_tracing()` is "flag and not
    compiling", so that the process-wide value masks mode 1 during a compile.
    """
    reader = find("torch.compiler", "is_compiling")
    session = find("torch.compiler", "_compile_session_context.__wrapped__")
    find("torch.compiler", "_is_compiling_flag")
    _lend_local(torch.compiler, undo)
    _thread_local_attribute(torch.compiler, "_is_compiling_flag", "compiling", undo)
    _swap_code(session, _compile_session, undo)
    _swap_code(reader, _is_compiling, undo)


def isolate_settings(undo: ExitStack) -> None:
    """Give each thread its own settings behind `torch.compile(dynamic=...)` (mode 15).

    What they were before holds in every thread that does not set them itself.
    """
    entries = find("torch._dynamo.config", "_config")
    for name in OF_DYNAMIC:
        find("torch._dynamo.config", name)
        entry = entries[name]
        if not hasattr(entry, "user_override"):
            raise MissingName(f"torch._dynamo.config._config[{name!r}].user_override")
        old = type(entry)
        entry.__class__ = _entry_of_each_thread(old, name, entry.user_override)
        undo.callback(setattr, entry, "__class__", old)


# Transplanted code: see the top of the file. TorchScript compiles `is_compiling` from its source,
# and of an `if is_scripting()` it takes one branch only, so this form must stay.


def _is_fx_tracing() -> bool:
    warn = globals().get("is_fx_tracing_warning")
    if warn is not None:
        warn()
    return _dflash_local.tracing


def _is_fx_symbolic_tracing() -> bool:
    return _dflash_local.tracing and not torch.compiler.is_compiling()


def _is_compiling() -> bool:
    if torch.jit.is_scripting():
        return False
    else:
        return _dflash_local.compiling


def _compile_session() -> Iterator[None]:
    prior = _dflash_local.compiling
    try:
        _dflash_local.compiling = True
        yield
    finally:
        _dflash_local.compiling = prior


def _new_patcher() -> Iterator[Any]:
    prior = _dflash_local.patcher
    patcher = globals()["_Patcher"]()
    try:
        _dflash_local.patcher = patcher
        yield patcher
    finally:
        patcher.revert_all_patches()
        _dflash_local.patcher = prior


def _revert_own_patches() -> Iterator[None]:
    patcher = _dflash_local.patcher
    removed = patcher and patcher.revert_all_patches()
    try:
        yield
    finally:
        if (patcher and patcher.reapply_all_patches()) != removed:
            raise AssertionError("the patcher was changed during a revert_all_patches")


# Wrappers


def _tracing_in_its_thread(trace: Callable[..., Any]) -> Callable[..., Any]:
    """`Tracer.trace` that sets the thread's flag; the STORE_GLOBAL inside is read by nobody."""

    @functools.wraps(trace)
    def flagged(*args: Any, **kwargs: Any) -> Any:
        prior = _dflash_local.tracing
        _dflash_local.tracing = True
        try:
            return trace(*args, **kwargs)
        finally:
            _dflash_local.tracing = prior

    return flagged


def _tracing_under(lock: Any, trace: Callable[..., Any]) -> Callable[..., Any]:
    """`Tracer.trace` under torch's own compile lock, an RLock: traces in a compile nest in it."""

    @functools.wraps(trace)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return trace(*args, **kwargs)

    return locked


def _patching_own_thread(patch_method: Callable[..., Any]) -> Callable[..., Any]:
    """`_Patcher.patch_method` whose new method acts in the patching thread only."""

    @functools.wraps(patch_method)
    def patch(
        self: Any, cls: type, name: str, new: Callable[..., Any], *rest: Any, **kw: Any
    ) -> Any:
        owner, old = threading.get_ident(), getattr(cls, name)

        @functools.wraps(new)
        def in_owner(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == owner else old)(*args, **kwargs)

        skip(in_owner)
        return patch_method(self, cls, name, in_owner, *rest, **kw)

    return patch


# How something is replaced, and put back


def _swap_code(function: FunctionType, template: Callable[..., Any], undo: ExitStack) -> None:
    """Let `function` run the code of `template`; the function object stays the same."""
    old, new = function.__code__, template.__code__
    function.__code__ = new.replace(co_name=old.co_name, co_qualname=old.co_qualname)
    skip(function)
    undo.callback(setattr, function, "__code__", old)


def _rebind(owner: Any, name: str, new: Any, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def _wrap_trace(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack) -> None:
    tracer = find("torch.fx", "Tracer")
    wrapper = wrap(tracer.trace)
    skip(wrapper)
    _rebind(tracer, "trace", wrapper, undo)


def skip(function: Callable[..., Any]) -> None:
    """Let Dynamo pass over the frames of `function`, as it does over torch's own here."""
    find("torch._dynamo.eval_frame", "skip_code")(function.__code__)


def _lend_local(module: Any, undo: ExitStack) -> None:
    """Put the thread-local into the module's globals, where transplanted code looks it up."""
    if "_dflash_local" not in vars(module):
        module._dflash_local = _dflash_local
        undo.callback(delattr, module, "_dflash_local")


def _thread_local_attribute(module: Any, name: str, field: str, undo: ExitStack) -> None:
    """Make `module.name`, as others read and write it from outside, the thread's own.

    The module's own functions use its dict and bypass this; a class is all that can intercept
    an attribute that exists (`_set_compilation_env` of every higher-order op writes one).
    """

    def get(_: Any) -> bool:
        return bool(getattr(_dflash_local, field))

    def put(_: Any, value: object) -> None:
        setattr(_dflash_local, field, bool(value))

    old = type(module)
    module.__class__ = type(old.__name__, (old,), {name: property(get, put)})
    undo.callback(setattr, module, "__class__", old)


def _entry_of_each_thread(base: type, name: str, before: Any) -> type:
    """An entry of torch's settings whose value each thread sets for itself."""

    def get(_: Any) -> Any:
        return _dflash_local.settings.get(name, before)

    def put(_: Any, value: Any) -> None:
        _dflash_local.settings[name] = value

    return type(base.__name__, (base,), {"user_override": property(get, put)})
