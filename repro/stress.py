"""A realistic load: drafter threads that compile and train, target threads that run eager models.

No schedule is enforced here: a failure is a finding, its absence only says that this load, for so
long, did not meet it.

    python stress.py --seconds 30 --drafters 3 --targets 1 --cure shipped

Prints JSON lines: the plan, now and then the steps done, with --windows each closed FX trace, each
thread's first failures with their tracebacks, and last the outcome. Exit codes as in harness.py.
The process ends by itself even if threads hang; whoever started it should cope if it does not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import harness
import loads
import torch
import torch.fx
from cures import CURES, Cure, dflash_module
from stage import Stage

TICK_S = 5.0
JOIN_S = 30.0  # for a step, or a compile, that is under way when the time is up
FAILURES_SHOWN = 3  # of each thread
FAILURES_MOST = 20  # then a thread gives up: it has shown what there was to see

_printing = threading.Lock()


def say(**line: Any) -> None:
    with _printing:
        print(json.dumps(line, default=str), flush=True)


class Thread(threading.Thread):
    """Steps until the time is up, counts what goes wrong and goes on."""

    def __init__(self, name: str, make: loads.Make, cure: Cure) -> None:
        super().__init__(name=name, daemon=True)
        self._make, self._cure = make, cure
        self.steps = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self.end_s = 0.0

    def run(self) -> None:
        try:
            step = self._make()
        except Exception as error:
            self._failed(error)
            return
        while time.monotonic() < self.end_s and self.failures.total() < FAILURES_MOST:
            try:
                with self._cure.step():
                    self._count(step())
            except Exception as error:
                self._failed(error)

    def _count(self, wrong: str) -> None:
        self.steps += 1
        if wrong:
            self._note(wrong, "")

    def _failed(self, error: Exception) -> None:
        self._note(harness.described(error) or "", "".join(traceback.format_exception(error)))

    def _note(self, what: str, trace: str) -> None:
        self.failures[what] += 1
        if self.failures.total() <= FAILURES_SHOWN:
            say(thread=self.name, step=self.steps, failure=what, traceback=trace)


@contextlib.contextmanager
def watching(show: bool) -> Iterator[Any]:
    """See every trace window; with `show` say each when it closes."""
    windows = dflash_module("fx_windows")
    with windows.trace_windows((lambda one: say(window=str(one))) if show else None) as seen:
        yield seen


def cast(arguments: argparse.Namespace, cure: Cure) -> dict[str, loads.Make]:
    """The threads, by name."""
    device = arguments.device
    backend = arguments.backend or ("inductor" if device == "cuda" else "aot_eager")
    drafters = {
        f"drafter-{i}": loads.of_user(arguments.target)
        if arguments.target
        else loads.drafter(cure, device, backend, seed=i)
        for i in range(arguments.drafters)
    }
    targets = {f"target-{i}": loads.target(cure, device, seed=i) for i in range(arguments.targets)}
    return drafters | targets


def run_all(threads: list[Thread], seconds: float) -> list[str]:
    """Start, wait, and return the names of those that do not end."""
    end_s = time.monotonic() + seconds
    for thread in threads:
        thread.end_s = end_s
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end_s + JOIN_S:
        say(after_s=round(time.monotonic() - end_s + seconds), steps=_steps(threads))
        tick_end_s = min(time.monotonic() + TICK_S, end_s + JOIN_S)
        for thread in threads:
            thread.join(max(0.0, tick_end_s - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def _steps(threads: list[Thread]) -> dict[str, int]:
    return {thread.name: thread.steps for thread in threads}


def leftovers(module_call: Any) -> list[str]:
    """What the threads left behind in the process."""
    from torch.fx._symbolic_trace import is_fx_tracing

    left = {
        "the FX tracing flag is set": is_fx_tracing(),
        "nn.Module.__call__ is patched": torch.nn.Module.__call__ is not module_call,
    }
    return [what for what, is_left in left.items() if is_left]


def judged(
    threads: list[Thread], stuck: list[str], left: list[str], windows: Any
) -> tuple[str, str]:
    """Outcome and reason. Without a trace window, or without a step, nothing was tried."""
    failures = sum((thread.failures for thread in threads), collections.Counter())
    if stuck:
        return "hung", f"{', '.join(stuck)} did not end within {JOIN_S:g} s"
    if failures or left:
        return (
            "reproduced",
            f"{failures.total()} failures; left behind: {', '.join(left) or 'nothing'}",
        )
    idle = [thread.name for thread in threads if not thread.steps]
    if idle:
        return "cannot tell", f"{', '.join(idle)} made no step in the time given"
    if not windows.seen:
        return "cannot tell", "no trace window was opened"
    return "absent", f"no failure in {sum(thread.steps for thread in threads)} steps"


def main() -> None:
    arguments = _parser().parse_args()
    faulthandler.enable()
    cure = CURES[arguments.cure](Stage(gate_parties=arguments.drafters + arguments.targets))
    module_call = torch.nn.Module.__call__
    dflash_module("compile").keep_stand_in_guard()  # or a thread that ends might be DF014
    with cure.installed(), watching(arguments.windows) as windows:
        threads = [Thread(name, make, cure) for name, make in cast(arguments, cure).items()]
        say(torch=str(torch.__version__), **vars(arguments))
        stuck = run_all(threads, arguments.seconds)
        left = leftovers(module_call)
    outcome, reason = judged(threads, stuck, left, windows)
    if stuck:
        faulthandler.dump_traceback(all_threads=True)
    say(
        outcome=outcome,
        reason=reason,
        threads={thread.name: _account(thread) for thread in threads},
        trace_windows=len(windows.seen),
        threads_tracing_at_once=windows.threads_at_once(),
        left_behind=left,
    )
    os._exit(harness.EXIT_CODES[outcome])  # threads that hang must not hold the process


def _account(thread: Thread) -> dict[str, Any]:
    return {"steps": thread.steps, "failures": dict(thread.failures)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--drafters", type=int, default=3, help="threads that compile and train")
    parser.add_argument("--targets", type=int, default=1, help="threads that run an eager model")
    parser.add_argument("--cure", choices=sorted(CURES), default="none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--backend", help="of torch.compile; default: inductor on CUDA, else aot_eager"
    )
    parser.add_argument(
        "--target", metavar="PACKAGE.MODULE:FUNCTION", help="your own drafters' step"
    )
    parser.add_argument("--windows", action="store_true", help="say each trace window as it closes")
    return parser


if __name__ == "__main__":
    main()
