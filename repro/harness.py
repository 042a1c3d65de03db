"""What the reproducers share: the command line, the JSON line, cold caches, parked windows.

A reproducer is `reproduce(run) -> Finding`. Import this module before torch: it makes torch's
compile caches cold, because a warm cache opens no trace window and such a run would pass falsely.
"""

from __future__ import annotations

import argparse
import atexit
import contextvars
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cures import CURES, Cure, dflash_module
from stage import Missed, Stage, Standstill, Worker

EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125, "hung": 125}
CUDA_DEADLINE_S = 45.0  # a cold compile for CUDA starts a pool of compiler processes
MOMENTS = ("later", "start-up", "in-compile")


def cold_caches() -> None:
    """Point Inductor at an empty directory, removed at exit, and switch its caches off."""
    folder = tempfile.mkdtemp(prefix="repro-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child inherits the registration, not the folder
        shutil.rmtree(folder, ignore_errors=True)


cold_caches()


@dataclass(frozen=True)
class Finding:
    """What a run showed.

    `outcome` is a key of EXIT_CODES. `manner` is "silent" where compiled code fell back to eager
    without a word, and "masked" where the cause was there and something else hid its effect.
    """

    outcome: str
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    manner: str = ""


def judged(bad: bool, reason: str, manner: str = "", **evidence: Any) -> Finding:
    return Finding("reproduced" if bad else "absent", reason, evidence, manner)


def needs_cuda(run: Run) -> None:
    """Raises `Missed` on the CPU, where this failure cannot be."""
    if run.device != "cuda":
        raise Missed("this failure needs CUDA: --device cuda")


class Run:
    """One run of a reproducer: its stage, cure, threads, and the windows that were opened."""

    def __init__(self, cure: type[Cure], when: str = "later", device: str = "cpu") -> None:
        self.stage = Stage()
        self.cure = cure(self.stage)
        self.at_start_up = when == "start-up"
        self.within_compile = when == "in-compile"
        self.device = device
        self.windows: list[str] = []
        self.workers: list[Worker] = []

    def start(self, name: str, act: Callable[[], Any]) -> Worker:
        dflash_module("compile").keep_stand_in_guard()  # or every failure would be DF014
        if self.cure.copies_context:
            act = _in_context(contextvars.copy_context(), act)
        worker = Worker(name, self.stage, act)
        self.workers.append(worker)
        worker.start()
        return worker

    def finish(self, within_s: float | None = None) -> None:
        """Join every thread; raises `Missed` if one is stuck or missed its point.

        Args:
            within_s: the stage's deadline if None.
        """
        within_s = self.stage.deadline_s if within_s is None else within_s
        deadline_s = time.monotonic() + within_s
        with self.stage.everyone_has_entered():
            for worker in self.workers:
                worker.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [worker.name for worker in self.workers if worker.is_alive()]
        for missed in (self.stage.missed, *(worker.error for worker in self.workers)):
            if isinstance(missed, Missed):
                raise missed
        if stuck:
            raise Missed(f"{', '.join(stuck)} did not end within {within_s:g} s")

    def opened(self, what: str) -> None:
        self.windows.append(f"{threading.current_thread().name}: {what}")

    def traced(self, inside: Callable[[], None]) -> Callable[[Any], Any]:
        """A function for `fx.symbolic_trace` that calls `inside` in the open trace window."""
        import torch.fx

        def parked(x: Any) -> Any:
            if isinstance(x, torch.fx.Proxy):  # only a trace that really runs passes proxies
                self.opened("fx trace")
                inside()
            return x + 1

        return parked

    def backend(self, inside: Callable[[], None]) -> Callable[..., Any]:
        """A torch.compile backend that calls `inside` while the compile is under way."""

        def parked_backend(graph: Any, _inputs: Any) -> Any:
            self.opened("compile")
            inside()
            return graph.forward

        return parked_backend

    def first_step(self) -> None:
        """A thread's first step, over before anything is watched; at start-up there is none."""
        if not self.at_start_up:
            with self.cure.step():
                pass


class CountingBackend:
    """A torch.compile backend that counts the graphs it was given and the runs of their code."""

    def __init__(self, opened: Callable[[str], None] = lambda _what: None) -> None:
        self._opened = opened
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self._opened("compile")
        self.graphs += 1

        def counted(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)  # not graph(): Module.__call__ has troubles of its own

        return counted

    def ran(self, compiled: Callable[..., Any], *args: Any) -> bool:
        """Call `compiled`; False if it fell back to eager without a word."""
        before = self.runs
        compiled(*args)
        return self.runs > before


def own_code(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo's caches and limits hang on it.

    `name`: by it Dynamo remembers which sizes have changed, for every code object from one place.
    """
    code = function.__code__
    own = code.replace(co_name=name or code.co_name)
    return types.FunctionType(own, function.__globals__)


def _in_context(context: contextvars.Context, act: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: context.run(act)


def raised_in(error: BaseException | None) -> str | None:
    """The function that raised: errors are told apart by their place, not by their wording."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    return frames[-1].name if frames else None


def described(error: BaseException | None) -> str | None:
    """`Type in file:line function: text`, or None."""
    if error is None:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno} {last.name}"
    return f"{type(error).__name__} in {place}: {error}"


def examine(reproduce: Callable[[Run], Finding], run: Run) -> Finding:
    """Reproduce with the cure installed; a run that opened no window is never `absent`."""
    try:
        with run.stage.seeing_the_compile_lock(), run.cure.installed():
            finding = reproduce(run)
    except Standstill as standstill:
        return Finding("hung", str(standstill))
    except Missed as missed:
        return Finding("cannot tell", str(missed))
    if finding.outcome == "absent" and not run.windows:
        return Finding("cannot tell", "no trace window was opened", finding.evidence)
    return finding


def main(code: str, mode: str, page: str, reproduce: Callable[[Run], Finding]) -> NoReturn:
    """Run one reproducer as a program: text, then one JSON line, then its exit code."""
    arguments = _parser(page).parse_args()
    if arguments.list_cures:
        print("\n".join(f"{cure.name:24} {cure.summary}" for cure in CURES.values()))
        sys.exit(0)
    import torch

    started = time.monotonic()
    run = Run(CURES[arguments.cure], arguments.when, arguments.device)
    finding = examine(reproduce, run)
    line = {
        "code": code,
        "mode": mode,
        "cure": arguments.cure,
        "when": arguments.when,
        "device": arguments.device,
        "outcome": finding.outcome,
        "manner": finding.manner,
        "reason": finding.reason,
        "torch": str(torch.__version__),
        "evidence": {**finding.evidence, "windows": run.windows},
        "seconds": round(time.monotonic() - started, 3),
    }
    print(json.dumps(line), flush=True)
    _leave(EXIT_CODES[finding.outcome], run)


def _leave(exit_code: int, run: Run) -> NoReturn:
    if any(worker.is_alive() for worker in run.workers):
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
        os._exit(exit_code)  # the interpreter's own shutdown could wait on the stuck thread
    sys.exit(exit_code)


def _parser(page: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=page, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cure", choices=sorted(CURES), default="none", help="cure to apply")
    parser.add_argument(
        "--when",
        choices=MOMENTS,
        default="later",
        help="open the window in a later step of a thread (a recompile), in its first step, or, "
        "DF001 and DF003, within a compile",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--list-cures", action="store_true", help="print the cures and exit")
    return parser
