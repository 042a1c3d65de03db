"""The parked schedules with the user's own compile function in the compiling thread.

`package.module:function` names a step, or a function that returns one; it is called without
arguments, in the thread that is to compile. Which failures it can meet depends on what its compile
does: a backend that opens no FX trace, for example, cannot break an eager module (DF003).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import harness
import loads
import schedules
import torch
import torch.fx
from torch.fx._symbolic_trace import is_fx_tracing
from torch.fx.proxy import TracerBase

DEADLINE_S = 240.0  # a real model's cold compile may take minutes
NO_TRACE = "its first step opened no FX trace of the kind that does this; does it compile there?"
DRAWS = 64
CODES = ["DF001", "DF003", "DF004", "DF006"]


def reproducers(target: str) -> dict[str, Callable[[harness.Run], harness.Finding]]:
    """By code, the failures that can be shown with a function of the user's."""
    checks = (_warm_step, _eager_module, _second_trace, _draws)
    function = loads.find(target)
    return {code: _with(check, function) for code, check in zip(CODES, checks, strict=True)}


def _with(check: Callable[..., harness.Finding], function: Callable[[], Any]) -> Any:
    def reproduce(run: harness.Run) -> harness.Finding:
        run.stage.deadline_s = DEADLINE_S
        return check(run, function)

    return reproduce


def _warm_step(run: harness.Run, function: Callable[[], Any]) -> harness.Finding:
    """The user's step, warm, beside a trace in another thread."""
    step = loads.step_of(function)
    worker = schedules.beside_trace(run, warm_up=lambda: (step(), step()), act=step)
    if harness.raised_in(worker.error) in ("compile_wrapper", "path_of_module"):
        return _bad("the warm step failed beside a trace", worker.error)
    return _fine("the warm step ran", worker.error)


def _eager_module(run: harness.Run, function: Callable[[], Any]) -> harness.Finding:
    """An eager module beside the user's first step."""
    module, x_BN = torch.nn.Linear(4, 4), torch.ones(2, 4)
    worker, windows = _beside_first_step(run, function, lambda: module(x_BN), _takes_modules)
    if harness.raised_in(worker.error) == "path_of_module":
        return _bad("an eager module was called into the step's trace", worker.error)
    return _fine("the eager module ran", worker.error) if windows else _no_trace()


def _takes_modules(tracer: torch.fx.Tracer) -> bool:
    """Whether a module called meanwhile would be noted in the trace; make_fx just runs it."""
    return type(tracer).call_module is torch.fx.Tracer.call_module


def _second_trace(run: harness.Run, function: Callable[[], Any]) -> harness.Finding:
    """A trace that begins within one of the user's first step and outlives it."""
    call = torch.nn.Module.__call__
    windows: list[str] = []

    def first(inside: Callable[[], None]) -> Any:
        with _parked_in_first_trace(inside, windows):
            return loads.step_of(function)()

    def second(inside: Callable[[], None]) -> Any:
        return torch.fx.symbolic_trace(run.traced(inside))

    workers = schedules.overlapping(run, first, second)
    left = torch.nn.Module.__call__ is not call
    torch.nn.Module.__call__ = call
    errors = [worker.error for worker in workers if worker.error]
    raised = {harness.raised_in(error) for error in errors}
    if left or raised & {"_new_patcher", "path_of_module"}:
        return _bad(f"overlapping traces; nn.Module.__call__ left patched: {left}", *errors)
    return _fine("both traces ended well", *errors) if windows else _no_trace()


def _draws(run: harness.Run, function: Callable[[], Any]) -> harness.Finding:
    """Another thread's draws during the user's first step, and what is drawn afterwards."""
    generator = torch.Generator().manual_seed(7) if run.cure.private_generator else None

    def draw() -> list[int]:
        return torch.randint(2**62, (DRAWS,), generator=generator).tolist()

    worker, windows = _beside_first_step(run, function, draw)
    if worker.error:
        return _fine("", worker.error)
    repeated = len(set(worker.value) & set(draw()))
    if repeated:
        return _bad(f"{repeated} of {DRAWS} numbers drawn beside the step were drawn again")
    return _fine("no number was drawn twice") if windows else _no_trace()


def _beside_first_step(
    run: harness.Run,
    function: Callable[[], Any],
    act: Callable[[], Any],
    wanted: Callable[[Any], bool] = lambda _tracer: True,
) -> tuple[Any, list[str]]:
    """Let B act while A, in the user's first step, stands in its first FX trace of that kind."""
    windows: list[str] = []

    def window(inside: Callable[[], None]) -> None:
        with _parked_in_first_trace(inside, windows, wanted):
            loads.step_of(function)()

    worker = schedules.beside(run, window, schedules.nothing, act)
    run.windows += windows
    return worker, windows


@contextlib.contextmanager
def _parked_in_first_trace(
    inside: Callable[[], None],
    windows: list[str],
    wanted: Callable[[Any], bool] = lambda _tracer: True,
) -> Iterator[None]:
    """Call `inside` at the first operation that this thread's first wanted FX trace notes.

    Inputs are noted before modules are patched, and Dynamo notes operations in no FX trace at all:
    the tracing flag tells those apart.
    """
    create_node, owner = TracerBase.create_node, threading.get_ident()

    def watched(self: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        mine = kind != "placeholder" and threading.get_ident() == owner and is_fx_tracing()
        if mine and not windows and wanted(self):
            windows.append(f"{threading.current_thread().name}: {type(self).__name__}")
            inside()
        return create_node(self, kind, *args, **kwargs)

    TracerBase.create_node = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        TracerBase.create_node = create_node  # type: ignore[method-assign]


def _bad(reason: str, *errors: BaseException | None) -> harness.Finding:
    return harness.judged(True, reason, errors=[harness.described(error) for error in errors])


def _fine(reason: str, *errors: BaseException | None) -> harness.Finding:
    failed = [harness.described(error) for error in errors if error]
    if failed:
        return harness.Finding("cannot tell", f"the step failed of something else: {failed[0]}")
    return harness.judged(False, reason)


def _no_trace() -> harness.Finding:
    return harness.Finding("cannot tell", NO_TRACE)
