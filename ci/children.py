"""Measurements in processes of their own: one line of JSON each, and an error is a result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar

from shapes import Shape

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
TURNS = "DFLASH_BENCH_TURNS"
LIMIT = "DFLASH_BENCH_LIMIT_S"
TRACEBACK = "Traceback (most recent call last):"
ERROR_CHARACTERS = 300  # the first of an error: CUDA's out of memory lists every process


def step_of(
    contender: str,
    shape: Shape,
    *,
    device: str,
    steps: int,
    timeout_s: float,
    path: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """What step_child.py finds of the contender's training step; or {"error": why it does not}.

    Args:
        timeout_s: for importing and compiling, and for measuring; waiting is not counted.
        path: directories to import from before the installed packages.
    """
    child = str(Path(__file__).with_name("step_child.py"))
    command = [sys.executable, child, contender, json.dumps(asdict(shape)), device, str(steps)]
    places = os.pathsep.join(str(place) for place in (ROOT, *path))
    ours = {"PYTHONPATH": places, TURNS: turns().name, LIMIT: str(timeout_s)}
    done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"error": why(done, timeout_s), "stderr": done.stderr[-6000:]}


def why(done: subprocess.CompletedProcess[str], timeout_s: float) -> str:
    """The error that ended a process; of one past its limit, where its main thread was."""
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if not any(line.startswith("Timeout (") for line in said):
        return error_of(said)[:ERROR_CHARACTERS]
    # Every thread's newest call, the main thread's last; a dump can be cut short.
    places = [line.strip() for above, line in pairwise(said) if "(most recent call first)" in above]
    return f"not done after {timeout_s:g} s, in {places[-1] if places else 'an unknown place'}"


def error_of(said: list[str]) -> str:
    """What the last traceback was raised for, or else the last line.

    Not always the last line: torch.compile's errors end in advice.
    """
    if TRACEBACK not in said:
        return said[-1]
    last = len(said) - said[::-1].index(TRACEBACK)
    return next((line for line in said[last:] if not line.startswith(" ")), said[-1])


def side_by_side(
    measure: Callable[[T], dict[str, Any]], whats: Iterable[T], *, at_once: int
) -> Iterator[dict[str, Any]]:
    """The measurements in order, from so many processes at once.

    They compile side by side, and measure by turns while nobody compiles. Each has its memory all
    the time: there must be enough for all.
    """
    turns()  # made here, so that the threads find one
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(measure, whats)


@cache
def turns() -> IO[str]:
    """The file by which those whom this process starts take turns: see taking_turns.alone."""
    return Path(os.environ[TURNS]).open() if TURNS in os.environ else NamedTemporaryFile("r")
