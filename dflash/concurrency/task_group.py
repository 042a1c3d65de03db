"""A task group: threads that end together, and one error that says why, root cause first."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import ClassVar, NamedTuple, Self, TypeVarTuple

from dflash.concurrency.channel import ChannelBroken
from dflash.concurrency.scope import Cancelled, Scope, one_line, stacks_of

Args = TypeVarTuple("Args")


class StuckThreads(Exception):
    """Threads went on after the grace period; `__cause__` holds the failures known by then."""

    remedy: ClassVar[str] = (
        "a thread blocked in C cannot be interrupted: report this, flush the logs and os._exit(70)"
    )

    def __init__(self, group: str, threads: list[threading.Thread], grace_s: float) -> None:
        self.names = tuple(thread.name for thread in threads)
        super().__init__(
            f"group {group!r}: {', '.join(self.names)} did not stop within {grace_s:g} s; "
            f"{self.remedy}\n{stacks_of(threads)}"
        )


class _Failure(NamedTuple):
    thread: str
    error: BaseException

    def is_only(self, *kinds: type[BaseException]) -> bool:
        """Whether the error, or every error in a group of them, is of these kinds."""
        if isinstance(self.error, BaseExceptionGroup):
            return self.error.split(kinds)[1] is None
        return isinstance(self.error, kinds)


class TaskGroup:
    """Threads under one scope; the first failure cancels it, and `with` waits for all of them.

    Leaving the `with` raises one `ExceptionGroup` (`BaseExceptionGroup` where a member asks for
    it), root cause first, then by time; each member has a note that names its thread. `Cancelled`,
    and `ChannelBroken` where something else failed, are consequences: notes on the root cause. An
    exception in the body, or raised by a signal handler during the wait, is a failure like others.
    A scope cancelled without a cause is a stop, not an error: nothing is raised.

    There is no deadline while nobody has failed: the tasks own theirs. Once cancelled, they have
    `grace_s` seconds in all (less if interrupted again), then `StuckThreads` is raised.
    """

    def __init__(self, name: str, grace_s: float = 10.0) -> None:
        self.name = name
        self.grace_s = grace_s
        self.scope = Scope(name)
        self._open = False
        self._threads: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._failures: list[_Failure] = []

    def start(self, fn: Callable[[*Args], object], *args: *Args, name: str) -> None:
        """Run `fn(*args)` in a thread called `name`, in a copy of the caller's context.

        So settings that live in context variables, as torch's do from 2.12 on, hold in it too.
        Raises `RuntimeError` outside the group's `with`; `Cancelled` if the group is cancelled.
        """
        with self.scope.changed:
            if not self._open:
                raise RuntimeError(f"group {self.name!r}: cannot start {name!r} outside its `with`")
            self.scope.check()
            # A daemon, so that a stuck thread cannot keep the process alive.
            run = copy_context().run
            thread = threading.Thread(None, run, name, (self._run, fn, *args), daemon=True)
            # Known before it runs: a signal handler may raise after `start` has made the thread.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the system gave no thread
                self._threads.remove(thread)
                raise

    def cancel(self, reason: str) -> None:
        """Stop all tasks: each sees `Cancelled(reason)` at its next wait. Not an error."""
        self.scope.cancel(reason)

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._fail(error)
        stuck = self._join()
        failed = self._failed()
        if stuck:
            raise StuckThreads(self.name, stuck, self.grace_s) from failed
        if failed is not None:
            raise failed from None
        return True  # nothing failed: if something left the body, it was this scope's Cancelled

    def _run(self, fn: Callable[[*Args], object], *args: *Args) -> None:
        with self._catching_failures():
            fn(*args)
        with self.scope.changed:
            self._ended.add(threading.current_thread())
            self.scope.changed.notify_all()

    @contextmanager
    def _catching_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        name = threading.current_thread().name
        with self.scope.changed:
            self._failures.append(_Failure(name, error))
            self.scope.cancel(f"{name} failed: {one_line(error)}", error)

    def _running(self) -> list[threading.Thread]:
        return [thread for thread in self._threads if thread not in self._ended]

    def _join(self) -> list[threading.Thread]:
        """Wait for the tasks and return those that outlived the grace period."""
        # Not Thread.join: interrupted by a signal, it marks a running thread as stopped (3.11).
        with self.scope.changed:
            with self._catching_failures():
                self.scope.wait_until(lambda: self.scope.cancelled or not self._running())
            with self._catching_failures():
                self.scope.wait_until(lambda: not self._running(), self.grace_s)
            self._open = False
            stuck = self._running()
        for thread in tuple(self._ended):
            thread.join(self.grace_s)  # has left its task; only its last bytecodes remain
        return stuck

    def _failed(self) -> BaseExceptionGroup | None:
        with self.scope.changed:
            failures = self._all_failures()
        members = (
            [f for f in failures if not f.is_only(Cancelled, ChannelBroken)]
            or [f for f in failures if not f.is_only(Cancelled)]
            # Another scope's Cancelled, that came out of a task of this one.
            or [f for f in failures if f.error is self.scope.cause]
        )
        if not members:
            return None
        for thread, error in members:
            error.add_note(f"in thread {thread} of group {self.name}")
        for thread, error in (f for f in failures if f not in members):
            members[0].error.add_note(f"then {thread} stopped: {one_line(error)}")
        title = f"group {self.name} failed, root cause first"
        return BaseExceptionGroup(title, [member.error for member in members])

    def _all_failures(self) -> list[_Failure]:
        """Return the failures by time, with the cause that an outsider cancelled the scope for."""
        cause = self.scope.cause
        if cause is None or any(failure.error is cause for failure in self._failures):
            return list(self._failures)
        return [_Failure("the caller of cancel", cause), *self._failures]
