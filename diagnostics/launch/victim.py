"""The program that a trial launches: writes numbered lines, then dies, both as its plan says.

It runs alone, as a copy, in whatever Python the launch finds: standard library only, and no syntax
newer than Python 3.8. Beside it lies its plan (a JSON object with the fields of `Plan` in
scene.py); what really happened goes to the file `record` named there, line by line, past every
buffer: `pid N PYTHON`, `written N`, `returned`.
"""

import functools
import io
import json
import logging
import os
import signal
import sys
from typing import Callable  # noqa: UP035  (older Pythons cannot subscript the other one)

WIDTH = 64  # bytes in a line, with its newline


def main(plan_path: str) -> None:
    """Write, die; or return, if the death did not kill."""
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    record = os.open(plan["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if os.environ.get("RANK", "0") != "0":  # of torchrun's workers the first one dies
        signal.pause()
    os.write(record, b"pid %d %s\n" % (os.getpid(), os.path.realpath("/proc/self/exe").encode()))
    write = WRITERS[plan["output"]]()
    written = 0
    try:
        for number in range(1, plan["lines"] + 1):
            write(f"line {number:06d} ".ljust(WIDTH - 1, "."))
            written = number
    finally:
        os.write(record, b"written %d\n" % written)
    exec(compile(plan["code"], "train.py", "exec"), {"__name__": "train"})
    os.write(record, b"returned\n")


def _print() -> Callable[[str], None]:
    return print


def _flushing() -> Callable[[str], None]:
    return functools.partial(print, flush=True)


def _logging() -> Callable[[str], None]:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return logging.info


def _line_buffered() -> Callable[[str], None]:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return print


WRITERS = {
    "print": _print,
    "flush": _flushing,
    "logging": _logging,
    "reconfigure": _line_buffered,
}

if __name__ == "__main__":
    main(os.path.join(os.path.dirname(os.path.abspath(__file__)), "plan.json"))
