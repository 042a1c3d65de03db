"""Run many cells (reproducer, cure, moment) forked from one process that has imported torch.

A reproducer on its own spends most of its seconds importing torch. Here every cell still has a
process of its own, which may hang or die without harm to the others; it costs a fork instead.

    python cells.py --code DF001 --cure none --cure shipped

Prints a JSON line with the plan, then one for each cell, in the order in which they end. COST is a
cell too: see cost.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cost
import harness
import loads
import torch
import torch._dynamo  # imported once here, instead of lazily in every cell
from cures import CURES
from stage import Missed
from target import CODES as TARGET_CODES
from target import reproducers as reproducers_of

HERE = Path(__file__).resolve().parent
COST = "COST"
CUDA_CODES = ("DF012", "DF013")
IN_COMPILE_CODES = ("DF001", "DF003")
# What is run unless cures are named: the bare failures, what the trainer does, and what is
# proposed most often.
USUAL_CURES = ("none", "shipped", "gate-only", "lock-every-step")
TARGET_CURES = ("none", "shipped", "lock-every-step")  # a real compile may take minutes
# Cures that act on a thread's first step: what they do later says little about start-up.
START_UP_CURES = ("lock-first-step", "gate-only", "main-thread-first")
# Cures that say something of a trace opened by a compile, unless everything is asked for.
IN_COMPILE_CURES = ("none", "shipped", "own-is-compiling")
TIMEOUT_S = {"cpu": 30.0, "cuda": 120.0, "target": 300.0}


@dataclass
class Running:
    """A forked cell: its process, the pipe that its JSON comes through, and when it must end."""

    cell: str
    pid: int
    pipe: int
    started_s: float
    deadline_s: float


def reproducer(code: str) -> Any:
    """The module of a reproducer, by its code."""
    (path,) = HERE.glob(f"{code.lower()}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(cell: str, device: str, target: str | None) -> Running:
    """Fork a cell; the child never returns."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_and_leave(cell, device, target, writing)
    os.close(writing)
    now_s = time.monotonic()
    timeout_s = TIMEOUT_S["target" if target else device]
    return Running(cell, pid, reading, now_s, now_s + timeout_s)


def _run_and_leave(cell: str, device: str, target: str | None, writing: int) -> None:
    code, cure, when = cell.split(":")
    run = harness.Run(CURES[cure], when, device)
    try:
        finding = _examined(code, run, target)
    except BaseException as error:  # whatever it is, the row must say so
        finding = harness.Finding("crashed", harness.described(error) or "")
    os.write(writing, json.dumps(vars(finding), default=str).encode())
    os._exit(0)  # threads that are still parked must not hold the cell up


def _examined(code: str, run: harness.Run, target: str | None) -> harness.Finding:
    if code == COST:
        return _measured(run)
    if target is not None:
        return harness.examine(reproducers_of(target)[code], run)
    return harness.examine(reproducer(code).reproduce, run)


def _measured(run: harness.Run) -> harness.Finding:
    try:
        return cost.measure(run)
    except Missed as missed:
        return harness.Finding("cannot tell", str(missed))


def end(running: Running) -> dict[str, Any]:
    """Reap an ended or overdue cell and say what became of it."""
    overdue = time.monotonic() >= running.deadline_s
    if overdue:
        os.kill(running.pid, signal.SIGKILL)
    with os.fdopen(running.pipe, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(running.pid, 0)
    code, cure, when = running.cell.split(":")
    return {
        "code": code,
        "cure": cure,
        "when": when,
        **_outcome(said, overdue, os.waitstatus_to_exitcode(status)),
        "torch": str(torch.__version__),
        "seconds": round(time.monotonic() - running.started_s, 2),
    }


def _outcome(said: bytes, overdue: bool, status: int) -> dict[str, Any]:
    if said:
        return json.loads(said)
    if overdue:
        return {"outcome": "hung", "reason": "still running at its deadline, and killed"}
    how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return {"outcome": "crashed", "reason": f"ended without a word: {how}"}


def run_all(cells: list[str], *, at_once: int, device: str, target: str | None) -> None:
    """Run the cells, `at_once` at a time, and print each as it ends."""
    waiting, running = list(cells), dict[int, Running]()
    while waiting or running:
        while waiting and len(running) < at_once:
            one = start(waiting.pop(0), device, target)
            running[one.pipe] = one
        next_deadline_s = min(one.deadline_s for one in running.values())
        readable, _, _ = select.select(
            list(running), [], [], max(0.0, next_deadline_s - time.monotonic())
        )
        overdue = [one.pipe for one in running.values() if time.monotonic() >= one.deadline_s]
        for pipe in {*readable, *overdue}:
            print(json.dumps(end(running.pop(pipe))), flush=True)


def plan(codes: list[str], cures: list[str], moments: Sequence[str], full: bool) -> list[str]:
    """Cure after cure, the later moment first: a table's rows in the order of reading."""
    return [
        f"{code}:{cure}:{when}"
        for cure in cures
        for when in moments
        for code in codes
        if _is_of_use(code, cure, when, full)
    ]


def _is_of_use(code: str, cure: str, when: str, full: bool) -> bool:
    if when == "in-compile":
        return code in IN_COMPILE_CODES and (full or cure in IN_COMPILE_CURES)
    return when == "later" or full or cure in START_UP_CURES


def main() -> None:
    """Say in one JSON line what will be run, then run it."""
    every_code = [*sorted(path.name[:5].upper() for path in HERE.glob("df[0-9]*.py")), COST]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", action="append", choices=every_code, help="only this mode")
    parser.add_argument("--cure", action="append", choices=list(CURES), help="only this cure")
    parser.add_argument("--full", action="store_true", help="every cure, at every moment")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--target", metavar="PACKAGE.MODULE:FUNCTION", help="your own function")
    parser.add_argument("--at-once", type=int, default=2, help="processes at a time")
    arguments = parser.parse_args()
    if arguments.target:
        loads.find(arguments.target)  # here, so that a wrong name is one message
        every_code = TARGET_CODES
    codes = arguments.code or every_code
    left_out = [code for code in codes if arguments.device == "cpu" and code in CUDA_CODES]
    usual_cures = TARGET_CURES if arguments.target else USUAL_CURES
    cures = arguments.cure or list(CURES if arguments.full else usual_cures)
    codes = [code for code in codes if code not in left_out]
    # A trace of the user's own function is within a compile anyway.
    moments = [when for when in harness.MOMENTS if not (arguments.target and when == "in-compile")]
    chosen = plan(codes, cures, moments, arguments.full)
    said = {"torch": str(torch.__version__), "cells": chosen, "left_out": left_out}
    print(json.dumps(said), flush=True)
    run_all(chosen, at_once=arguments.at_once, device=arguments.device, target=arguments.target)


if __name__ == "__main__":
    main()
