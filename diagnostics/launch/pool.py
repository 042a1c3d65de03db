"""Trials in worker processes, some at a time, with nothing left behind however it ends.

A worker has a session of its own, so that Ctrl-C reaches only us, and we end it in order. Where we
are killed instead, it finishes its trial, clears up, and meets the end of its pipe. A trial is left
where it waits, and nowhere else: an exception in the midst of making or removing its directory
would leave that behind.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Generic, TypeVar

from diagnostics.launch import family

T = TypeVar("T")
R = TypeVar("R")
END_S = 30.0  # a worker has processes to kill


class Broken(RuntimeError):
    """A trial could not be carried out: the message says why."""


class _Ended(BaseException):
    """SIGTERM came: leave the trial through its `finally`s."""


class _Sigterm:
    """Whether one came; signal handlers and trials are the main thread's."""

    came = False

    def note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


_sigterm = _Sigterm()


def leave_if_told() -> None:
    """For a trial to call again and again while it waits: it is left there if SIGTERM came."""
    if _sigterm.came:
        raise _Ended


class _Worker(Generic[T, R]):
    def __init__(self, act: Callable[[T], R]) -> None:
        # spawn, not fork: whoever calls may have threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, act))
        self.process.start()
        theirs.close()

    def answer(self) -> R:
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise Broken("a trial's process died") from None
        if isinstance(answer, Exception):
            raise Broken(f"{type(answer).__name__}: {answer}") from answer
        result: R = answer
        return result


def _work(pipe: Connection, act: Callable[[T], R]) -> None:
    os.setsid()
    # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    family.adopt_orphans()
    with suppress(EOFError, ConnectionError, _Ended):
        while True:
            item = pipe.recv()
            signal.signal(signal.SIGTERM, _sigterm.note)
            answer: R | Exception
            try:
                answer = act(item)
            except Exception as error:
                answer = error
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # idle, there is nothing to clear up
            leave_if_told()
            pipe.send(answer)


@contextmanager
def _workers(count: int, act: Callable[[T], R]) -> Iterator[list[_Worker[T, R]]]:
    started: list[_Worker[T, R]] = []
    try:
        started.extend(_Worker(act) for _ in range(count))
        yield started
    finally:
        for worker in started:
            worker.pipe.close()
            worker.process.terminate()
        for worker in started:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def results(items: Iterable[T], act: Callable[[T], R], at_once: int = 2) -> Iterator[tuple[T, R]]:
    """Each item with what `act` made of it in a worker process, in the order in which they end.

    `act` is a function of a module. Raises Broken if it raised, or if its process died.
    """
    waiting = iter(items)
    with _workers(at_once, act) as workers:
        busy: dict[Connection, tuple[_Worker[T, R], T]] = {}
        for worker, item in zip(workers, waiting, strict=False):
            worker.pipe.send(item)
            busy[worker.pipe] = (worker, item)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, item = busy.pop(pipe)
                yield item, worker.answer()
                for following in waiting:
                    pipe.send(following)
                    busy[pipe] = (worker, following)
                    break
