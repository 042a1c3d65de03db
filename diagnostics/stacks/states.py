"""What a thread is doing, read off its stack.

Each rule says how a state looks; the first that fits wins, the most specific ones come first. Names
of torch's functions were read in 2.11 to 2.14.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.stacks.threads import Thread

CONVERT_FRAME = "torch/_dynamo/convert_frame.py"
COMPILE_FX = "torch/_inductor/compile_fx.py"
ENGINE = "torch/autograd/graph.py"
FLEX = "torch/_higher_order_ops/flex_attention.py"


class State(StrEnum):
    """What a thread is doing; the value is how it is said after its name."""

    AWAITS_COMPILE_LOCK = "waits for torch's compile lock"
    COMPILE_AWAITS_AUTOGRAD = "compiles, and waits for autograd's thread of the device"
    AWAITS_AUTOGRAD = "waits for autograd's thread of the device"
    COMPILES = "compiles"
    AWAITS_DEVICE = "waits for all work on the CUDA device"
    AWAITS_EVENT = "waits for a CUDA event"
    AWAITS_STREAM = "waits for a CUDA stream"
    AWAITS_PYTHON = "waits for another thread"
    HOLDS_GIL = "holds the GIL"
    RUNS = "runs"
    IDLE = "is idle, or in C code"


@dataclass(frozen=True)
class Finding:
    """A thread, its state, and a detail: the stage of a compile, what is waited for."""

    thread: Thread
    state: State
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.thread} {self.state}{detail}"


Rule = Callable[[Thread], tuple[State, str] | None]


def classify(thread: Thread) -> Finding:
    """The state of one thread."""
    for rule in RULES:
        if found := rule(thread):
            return Finding(thread, *found)
    return Finding(thread, State.RUNS if thread.active else State.IDLE)


def _compile_lock(thread: Thread) -> tuple[State, str] | None:
    """Taking a lock leaves no Python frame: the innermost one is that of the `with` statement."""
    innermost = thread.python[:1]
    if thread.active or not innermost:
        return None
    if innermost[0].within(CONVERT_FRAME, "__call__"):
        return State.AWAITS_COMPILE_LOCK, "for a forward"
    if innermost[0].within(COMPILE_FX, "compile_fx_backward"):
        return State.AWAITS_COMPILE_LOCK, "for the backward of a compiled function"
    return None


def _autograd(thread: Thread) -> tuple[State, str] | None:
    if not (thread.python and thread.python[0].within(ENGINE, "_engine_run_backward")):
        return None
    if thread.has(FLEX, "create_fw_bw_graph"):
        return State.COMPILE_AWAITS_AUTOGRAD, "tracing flex_attention"
    if _stage(thread):
        return State.COMPILE_AWAITS_AUTOGRAD, _stage(thread)
    return State.AWAITS_AUTOGRAD, ""


def _compiles(thread: Thread) -> tuple[State, str] | None:
    stage = _stage(thread)
    return (State.COMPILES, stage) if stage else None


def _cuda(thread: Thread) -> tuple[State, str] | None:
    for state, symbols, file, functions in CUDA_WAITS:
        if thread.calls(*symbols):
            return state, ""
        innermost = thread.python[:1]
        if innermost and innermost[0].within(file, *functions):
            return state, ""
    return None


def _python_wait(thread: Thread) -> tuple[State, str] | None:
    innermost = thread.python[:1]
    if thread.active or not innermost or not innermost[0].path.endswith("/threading.py"):
        return None
    return State.AWAITS_PYTHON, innermost[0].function


def _gil(thread: Thread) -> tuple[State, str] | None:
    return (State.HOLDS_GIL, "") if thread.owns_gil else None


def _stage(thread: Thread) -> str:
    """The innermost stage of a compile that the thread is in; empty where it compiles nothing."""
    for frame in thread.python:
        for stage, files in STAGES.items():
            if any(part in frame.path for part in files):
                return stage if _is_compiling(thread) else ""
    return ""


def _is_compiling(thread: Thread) -> bool:
    return thread.has(CONVERT_FRAME, "_compile") or thread.has(COMPILE_FX, "compile_fx_backward")


STAGES = {
    "triton": ("/triton/", "torch/_inductor/runtime/", "torch/_inductor/async_compile.py"),
    "inductor": ("torch/_inductor/",),
    "AOT autograd": ("torch/_functorch/",),
    "dynamo": ("torch/_dynamo/",),
}
# (state, native functions that wait, and the Python ones around them: file, functions)
CUDA_WAITS: Sequence[tuple[State, tuple[str, ...], str, tuple[str, ...]]] = (
    (
        State.AWAITS_EVENT,
        ("cudaEventSynchronize", "cuEventSynchronize"),
        "torch/cuda/streams.py",
        ("synchronize",),
    ),
    (
        State.AWAITS_DEVICE,
        ("cudaDeviceSynchronize", "cuCtxSynchronize", "cuCtxSynchronize_v2"),
        "torch/cuda/__init__.py",
        ("synchronize",),
    ),
    (
        State.AWAITS_STREAM,
        ("cudaStreamSynchronize", "cuStreamSynchronize", "cuStreamSynchronize_ptsz"),
        "",
        (),
    ),
)
RULES: tuple[Rule, ...] = (
    _compile_lock,
    _autograd,
    _cuda,
    _compiles,
    _python_wait,
    _gil,
)
