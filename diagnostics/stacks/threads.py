"""The threads of a process at one moment, as a dump has them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Frame:
    """One call. `function` is without its class; native code has no `path`.

    `self_id` is the address of the frame's `self`, by which two threads' objects are told to be the
    same; no other local is ever read. A frame's place is compared without it.
    """

    function: str
    path: str = ""
    line: int = 0
    self_id: int | None = field(default=None, compare=False)

    @property
    def is_native(self) -> bool:
        """Whether it is no Python frame."""
        return not self.path

    def within(self, file: str, *functions: str) -> bool:
        """Whether this is one of the functions in a file, given by the end of its path."""
        return self.function in functions and self.path.endswith(file)

    def __str__(self) -> str:
        if self.is_native:
            return self.function
        return f"{self.function} ({self.path.rpartition('site-packages/')[2]}:{self.line})"


@dataclass(frozen=True)
class Kernel:
    """What the kernel says of a thread; None or empty where it does not say.

    Attributes:
        state: one letter, as in proc(5).
        syscall: number and arguments of the system call that it is blocked in.
        fd: what the call's first argument is open on, where that is a file descriptor.
        mutex_owner: thread id that holds the pthread mutex it waits for.
        cpu_ticks: processor time used so far.
        has_limit: whether it waits on a futex for a limited time.
        handles_signals: whether its process has a handler for one that programs are told to end or
            to go on with; SIGINT is none of them: Python always handles it.
    """

    state: str = ""
    syscall: tuple[int, ...] | None = None
    fd: str = ""
    mutex_owner: int | None = None
    cpu_ticks: int = 0
    has_limit: bool = False
    handles_signals: bool = False


@dataclass(frozen=True)
class Thread:
    """One thread: frames innermost first. An empty name is one that Python has none for."""

    name: str
    tid: int
    frames: tuple[Frame, ...]
    owns_gil: bool = False
    kernel: Kernel = Kernel()
    moved: bool = False
    """Whether it was somewhere else in an earlier sample."""

    def __str__(self) -> str:
        return self.name or f"thread {self.tid}"

    @property
    def runs(self) -> bool:
        """Whether it goes on."""
        return self.moved or self.kernel.state == "R"

    @property
    def runs_handlers(self) -> bool:
        """Whether it is the one in which Python runs handlers of signals, and there are some."""
        return self.name == "MainThread" and self.kernel.handles_signals

    @property
    def python(self) -> tuple[Frame, ...]:
        """The Python frames, innermost first."""
        return tuple(frame for frame in self.frames if not frame.is_native)

    @property
    def object_id(self) -> int | None:
        """The address of its threading.Thread; None for the main thread and those of C code."""
        for frame in self.python[::-1]:
            if frame.within("threading.py", "_bootstrap", "_bootstrap_inner"):
                return frame.self_id
        return None

    def has(self, file: str, *functions: str) -> bool:
        """Whether any frame is one of these functions in that file."""
        return any(frame.within(file, *functions) for frame in self.frames)

    def calls(self, *symbols: str) -> bool:
        """Whether a native frame is one of these functions."""
        return any(frame.is_native and frame.function in symbols for frame in self.frames)
