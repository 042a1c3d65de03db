"""Measurements in processes of their own: one line of JSON each, and an error is a result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar

from shapes import Shape

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
TURNS = "DFLASH_BENCH_TURNS"


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
        path: directories to import from before the installed packages.
    """
    child = str(Path(__file__).with_name("step_child.py"))
    command = [sys.executable, child, contender, json.dumps(asdict(shape)), device, str(steps)]
    places = os.pathsep.join(str(place) for place in (ROOT, *path))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": places, TURNS: turns().name},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"error": said[-1], "stderr": done.stderr[-6000:]}


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
    """The file by which those whom this process starts take turns: see clock.alone."""
    return Path(os.environ[TURNS]).open() if TURNS in os.environ else NamedTemporaryFile("r")
