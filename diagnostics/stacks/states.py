"""What a thread is doing, read off its stack and off what the kernel says.

Each rule says how some states look; the first that fits wins, the most specific ones come first.
Names of torch's functions were read in 2.11 to 2.14, those of the standard library in 3.8 to 3.14.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.stacks import proc
from diagnostics.stacks.threads import Thread

CONVERT_FRAME = "torch/_dynamo/convert_frame.py"
COMPILE_FX = "torch/_inductor/compile_fx.py"
ENGINE = "torch/autograd/graph.py"
FLEX = "torch/_higher_order_ops/flex_attention.py"
THREADING, QUEUE, POOL = "/threading.py", "/queue.py", "concurrent/futures/thread.py"


class State(StrEnum):
    """What a thread is doing; the value is how it is said after its name."""

    HOLDS_GIL = "holds the GIL in C code"
    UNINTERRUPTIBLE = "is in uninterruptible sleep in the kernel"
    STOPPED = "is stopped"
    COMPILE_AWAITS_AUTOGRAD = "compiles, and waits for autograd's thread of the device"
    AWAITS_COMPILE_LOCK = "waits for torch's compile lock"
    AWAITS_AUTOGRAD = "is in a backward, or waits for autograd's thread of the device"
    COMPILES = "compiles"
    AWAITS_NCCL = "waits for other GPUs in NCCL"
    AWAITS_DEVICE = "waits for all work on the CUDA device"
    AWAITS_EVENT = "waits for a CUDA event"
    AWAITS_STREAM = "waits for a CUDA stream"
    QUEUE_FULL = "waits for room in a queue"
    QUEUE_EMPTY = "waits for an item in a queue"
    QUEUE_JOIN = "waits for a queue's items to be done"
    BARRIER = "waits at a barrier"
    EVENT = "waits for an event"
    SEMAPHORE = "waits for a semaphore"
    CONDITION = "waits for a condition"
    JOIN = "waits for a thread to end"
    MUTEX = "waits for a mutex of C code"
    LOCK = "waits for a lock"
    CHILD = "waits for a child process"
    WRITES = "waits to write"
    READS = "waits to read"
    POLLS = "waits for input or output"
    ENDS = "has come to its end, and waits for the other threads"
    IDLE = "is idle in a pool of threads"
    SLEEPS = "sleeps"
    RUNS = "runs"
    IN_C = "is in C code, or idle"


@dataclass(frozen=True)
class Finding:
    """A thread, its state, a detail, and the object that it waits for (its address)."""

    thread: Thread
    state: State
    detail: str = ""
    object_id: int | None = None

    @property
    def said(self) -> str:
        """The state with its detail."""
        said = f"{self.state} ({self.detail})" if self.detail else str(self.state)
        return f"{said}, for a limited time" if self.thread.kernel.has_limit else said

    def __str__(self) -> str:
        return f"{self.thread} {self.said}"


Rule = Callable[[Thread], Finding | None]


def classify(thread: Thread) -> Finding:
    """The state of one thread."""
    for rule in RULES:
        if found := rule(thread):
            return found
    return Finding(thread, State.RUNS if thread.runs else State.IN_C)


def _kernel_states(thread: Thread) -> Finding | None:
    if thread.kernel.state == "D" and not thread.moved:
        return Finding(thread, State.UNINTERRUPTIBLE)
    if thread.kernel.state in ("T", "t"):
        return Finding(thread, State.STOPPED)
    return None


def _compile_lock(thread: Thread) -> Finding | None:
    """Taking a lock leaves no Python frame: the innermost one is that of the `with` statement."""
    innermost = thread.python[:1]
    if thread.runs or not innermost:
        return None
    if innermost[0].within(CONVERT_FRAME, "__call__"):
        return Finding(thread, State.AWAITS_COMPILE_LOCK, "for a forward")
    if innermost[0].within(COMPILE_FX, "compile_fx_backward"):
        return Finding(thread, State.AWAITS_COMPILE_LOCK, LAZY_BACKWARD)
    return None


def _autograd(thread: Thread) -> Finding | None:
    if not (thread.python and thread.python[0].within(ENGINE, "_engine_run_backward")):
        return None
    if thread.has(FLEX, "create_fw_bw_graph"):
        return Finding(thread, State.COMPILE_AWAITS_AUTOGRAD, "tracing flex_attention")
    if stage := _stage(thread):
        return Finding(thread, State.COMPILE_AWAITS_AUTOGRAD, stage)
    return None if thread.runs else Finding(thread, State.AWAITS_AUTOGRAD)


def _compiles(thread: Thread) -> Finding | None:
    stage = _stage(thread)
    return Finding(thread, State.COMPILES, stage) if stage else None


def _cuda(thread: Thread) -> Finding | None:
    for state, symbols, file, functions in CUDA_WAITS:
        if thread.calls(*symbols) or (
            thread.python[:1] and thread.python[0].within(file, *functions)
        ):
            return Finding(thread, state)
    return None


def _python_wait(thread: Thread) -> Finding | None:
    """The standard library's primitives: the frames around the innermost wait say which."""
    if thread.runs:
        return None
    frames = [frame for frame in thread.python[:4] if frame.path.endswith((THREADING, QUEUE))]
    if not frames or frames[0] != thread.python[0]:
        return None
    for state, file, function in PRIMITIVES:
        for frame in frames:
            if frame.within(file, function):
                # Of a primitive its condition, which all who wait there have in common: in some of
                # its methods `self` is a cell.
                waits_for = frame if state is State.JOIN else frames[0]
                return Finding(thread, state, object_id=waits_for.self_id)
    if frames[0].function != "wait":
        return None
    is_event = [frame.function for frame in frames[1:2]] == ["wait"]
    return Finding(
        thread, State.EVENT if is_event else State.CONDITION, object_id=frames[0].self_id
    )


def _idle(thread: Thread) -> Finding | None:
    """Its queue is one of C: no Python frame tells of it."""
    if thread.runs or not (thread.python and thread.python[0].within(POOL, "_worker")):
        return None
    return Finding(thread, State.IDLE)


def _gil(thread: Thread) -> Finding | None:
    """Held in both samples, at the same place: either C code, or Python that never yields."""
    if not thread.owns_gil or not _stands(thread):
        return None
    where = str(thread.python[0]) if thread.python else ""
    return Finding(thread, State.HOLDS_GIL, where)


def _stands(thread: Thread) -> bool:
    return not thread.runs and thread.kernel.state in ("S", "D")


def _system_call(thread: Thread) -> Finding | None:
    kernel = thread.kernel
    if kernel.syscall is None or thread.runs or not thread.python:
        return None
    number = kernel.syscall[0]
    if kernel.mutex_owner is not None:
        return Finding(thread, State.MUTEX, f"held by thread {kernel.mutex_owner}")
    if number == proc.FUTEX:
        return Finding(thread, State.LOCK, "in Python or in C")
    state = SYSTEM_CALLS.get(number)
    return Finding(thread, state, kernel.fd) if state else None


def _stage(thread: Thread) -> str:
    """The innermost stage of a compile that the thread is in; empty where it compiles nothing."""
    if not (thread.has(CONVERT_FRAME, "_compile") or thread.has(COMPILE_FX, "compile_fx_backward")):
        return ""
    for frame in thread.python:
        for stage, files in STAGES.items():
            if any(part in frame.path for part in files):
                return stage
    return ""


LAZY_BACKWARD = "for the backward of a compiled function"
STAGES = {
    "triton": ("/triton/", "torch/_inductor/runtime/", "torch/_inductor/async_compile.py"),
    "inductor": ("torch/_inductor/",),
    "AOT autograd": ("torch/_functorch/",),
    "dynamo": ("torch/_dynamo/",),
}
PRIMITIVES = (
    (State.QUEUE_FULL, QUEUE, "put"),
    (State.QUEUE_EMPTY, QUEUE, "get"),
    (State.QUEUE_JOIN, QUEUE, "join"),
    (State.JOIN, THREADING, "join"),
    (State.ENDS, THREADING, "_shutdown"),
    (State.BARRIER, THREADING, "_wait"),
    (State.BARRIER, THREADING, "_enter"),
    (State.SEMAPHORE, THREADING, "acquire"),
)
SYSTEM_CALLS = {
    **dict.fromkeys((proc.READ, proc.RECVFROM, proc.RECVMSG, proc.ACCEPT), State.READS),
    **dict.fromkeys((proc.WRITE, proc.CONNECT), State.WRITES),
    **dict.fromkeys((proc.POLL, proc.SELECT, proc.EPOLL, proc.PSELECT, proc.PPOLL), State.POLLS),
    **dict.fromkeys((proc.WAIT4, proc.WAITID), State.CHILD),
    **dict.fromkeys((proc.NANOSLEEP, proc.CLOCK_NANOSLEEP), State.SLEEPS),
}
# (state, native functions that wait, and the Python ones around them: file, functions)
CUDA_WAITS: Sequence[tuple[State, tuple[str, ...], str, tuple[str, ...]]] = (
    (State.AWAITS_NCCL, ("ncclGroupEnd", "ncclAllReduce"), "torch/cuda/nccl.py", ("all_reduce",)),
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
    _kernel_states,
    _compile_lock,
    _autograd,
    _cuda,
    _compiles,
    _gil,
    _python_wait,
    _idle,
    _system_call,
)
