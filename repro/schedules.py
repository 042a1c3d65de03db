"""The schedules: what two threads do, and in which order, up to the last event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from harness import Run
from stage import Worker, me

Inside = Callable[[], None]


def nothing() -> None:
    """What happens inside a window that nobody else is to see."""


def _on_main_thread(run: Run) -> bool:
    """Whether what the threads would have traced first was traced before they were started."""
    return run.at_start_up and run.cure.main_thread_first


def beside_trace(run: Run, warm_up: Callable[[], Any], act: Callable[[], Any]) -> Worker:
    """Let thread B act once while thread A stands in an fx trace; return B.

    A leaves its window when B has ended or is held up by a cure. B has done `warm_up` before.
    """

    def trace_in_a(inside: Inside) -> None:
        torch.fx.symbolic_trace(run.traced(inside))

    def compile_in_a(inside: Inside) -> None:
        backend = run.backend(lambda: trace_in_a(inside))
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    return beside(run, compile_in_a if run.within_compile else trace_in_a, warm_up, act)


def beside_compile(run: Run, act: Callable[[], Any]) -> Worker:
    """Let thread B act once while thread A stands in a compile, in its backend; return B."""

    def compile_in_a(inside: Inside) -> None:
        torch.compile(lambda x: x + 1, backend=run.backend(inside))(torch.ones(2))

    return beside(run, compile_in_a, nothing, act)


def beside(
    run: Run, window: Callable[[Inside], Any], warm_up: Callable[[], Any], act: Callable[[], Any]
) -> Worker:
    """Let thread B act once while thread A stands in `window`, where it calls what it was given."""

    def inside() -> None:
        run.stage.reach("A inside")
        run.stage.wait("B done", "B waits")

    def thread_a() -> None:
        run.first_step()
        run.stage.wait("B warm", "B done")
        with run.cure.step():
            if not _on_main_thread(run):
                window(inside)

    def thread_b() -> Any:
        with run.cure.step():
            warm_up()
            run.stage.reach("B warm")
        run.stage.wait("A inside", "A done")
        with run.cure.step():
            return act()

    if _on_main_thread(run):
        window(nothing)
    run.start("A", thread_a)
    worker = run.start("B", thread_b)
    run.finish()
    return worker


def overlapping(
    run: Run, a: Callable[[Inside], Any], b: Callable[[Inside], Any], names: str = "AB"
) -> list[Worker]:
    """Run two windows that overlap without nesting: A enters, B enters, A leaves, B leaves.

    `a` and `b` get the function to call inside their window. Returns the two threads, ended.
    """
    first, second = names
    if _on_main_thread(run):
        return [_in_this_thread(run, name, act) for name, act in zip(names, (a, b), strict=True)]

    def inside_first() -> None:
        run.stage.reach(f"{first} inside")
        run.stage.wait(f"{second} inside", f"{second} waits", f"{second} left")

    def inside_second() -> None:
        run.stage.reach(f"{second} inside")
        run.stage.wait(f"{first} left", f"{first} waits")

    def thread_first() -> Any:
        run.first_step()
        return _step(run, lambda: a(inside_first))

    def thread_second() -> Any:
        run.first_step()
        run.stage.wait(f"{first} inside", f"{first} left")
        return _step(run, lambda: b(inside_second))

    workers = [run.start(first, thread_first), run.start(second, thread_second)]
    run.finish()
    return workers


def _step(run: Run, act: Callable[[], Any]) -> Any:
    with run.cure.step():
        try:
            return act()
        finally:
            run.stage.reach(f"{me()} left")


def _in_this_thread(run: Run, name: str, act: Callable[[Inside], Any]) -> Worker:
    worker = Worker(name, run.stage, lambda: act(nothing))
    worker.run()
    return worker
