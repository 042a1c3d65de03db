"""The threads of a process at one moment, as a dump has them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """One call. `function` without its class; `path` and `line` are empty for native code."""

    function: str
    path: str = ""
    line: int = 0

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
class Thread:
    """One thread: frames innermost first. An empty name is one that Python has none for."""

    name: str
    tid: int
    frames: tuple[Frame, ...]
    owns_gil: bool = False
    active: bool = False

    def __str__(self) -> str:
        return self.name or f"thread {self.tid}"

    @property
    def python(self) -> tuple[Frame, ...]:
        """The Python frames, innermost first."""
        return tuple(frame for frame in self.frames if not frame.is_native)

    def has(self, file: str, *functions: str) -> bool:
        """Whether any frame is one of these functions in that file."""
        return any(frame.within(file, *functions) for frame in self.frames)

    def calls(self, *symbols: str) -> bool:
        """Whether a native frame is one of these functions."""
        return any(frame.is_native and frame.function in symbols for frame in self.frames)
