"""Run many cells (reproducer, cure, moment) forked from one process that has imported torch.

A reproducer on its own spends most of its seconds importing torch. Here every cell still has a
process of its own, which may hang or die without harm to the others; it costs a fork instead.

    python cells.py --code DF001 --cure none --cure shipped

Prints a JSON line with the plan, then one for each cell, in the order in which they end. COST is a
cell too: see cost.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cost
import harness
import loads
import torch
import torch._dynamo  # imported once here, instead of lazily in every cell
from children import Child, Overdue, ended
from cures import CURES
from stage import Missed
from target import CODES as TARGET_CODES
from target import reproducers as reproducers_of
from turns import Unclear

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


def reproducer(code: str) -> Any:
    """The module of a reproducer, by its code."""
    (path,) = HERE.glob(f"{code.lower()}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def examined(cell: str, device: str, target: str | None) -> dict[str, Any]:
    """What a cell says, in a process of its own."""
    code, cure, when = cell.split(":")
    try:
        finding = _examined(code, harness.Run(CURES[cure], when, device), target)
    except BaseException as error:  # whatever it is, the row must say so
        finding = harness.Finding("crashed", harness.described(error) or "")
    # Evidence may hold what cannot be sent to another process as it is.
    said: dict[str, Any] = json.loads(json.dumps(vars(finding), default=str))
    return said


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


def row(cell: str, child: Child) -> dict[str, Any]:
    """The cell's line, from a child that has ended or is overdue."""
    code, cure, when = cell.split(":")
    names = {"code": code, "cure": cure, "when": when, "torch": str(torch.__version__)}
    try:
        return {**names, **child.answer()}
    except Overdue as overdue:
        return {**names, "outcome": "hung", "reason": str(overdue)}
    except Unclear as died:
        return {**names, "outcome": "crashed", "reason": str(died)}


def run_all(cells: list[str], *, at_once: int, device: str, target: str | None) -> None:
    """Run the cells, `at_once` at a time, and print each as it ends."""
    timeout_s = TIMEOUT_S["target" if target else device]
    waiting, running = list(cells), dict[str, Child]()
    while waiting or running:
        while waiting and len(running) < at_once:
            cell = waiting.pop(0)
            running[cell] = Child(functools.partial(examined, cell, device, target), timeout_s)
        for cell in ended(running):
            print(json.dumps(row(cell, running.pop(cell))), flush=True)


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
