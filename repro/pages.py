"""The reproducers' docstrings as one page: `python repro/pages.py > repro/README.md`.

Reads the sources without running them, so it needs no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cures import CURES

HERE = Path(__file__).resolve().parent
INTRODUCTION = """# Concurrent torch.compile, broken on purpose

<!-- Written by pages.py from the docstrings: change those. -->

Each file is a program that finds out whether one failure happens on the torch that runs it:

    python repro/df001_fx_flag.py
    python repro/df001_fx_flag.py --cure thread-local-flag

The last line is JSON. Exit code 10: reproduced; 0: absent; 125: cannot tell, because the schedule
was not followed or no trace window opened; 1: the program crashed, which proves nothing."""
LAUNCHES = """# Launches, broken on purpose

The same for ways to start a run that lose its log, its last lines, its exit status or the run
itself. They need bash and no torch. The codes are those of `dflash-diag launch-check`:

    python repro/dl007_tee_hides_status.py
    python repro/dl007_tee_hides_status.py --fixed"""


def page() -> str:
    parts = [INTRODUCTION, "## Cures", _cures(), *_docstrings("df")]
    return "\n\n".join([*parts, LAUNCHES, *_docstrings("dl")]) + "\n"


def _docstrings(series: str) -> Iterator[str]:
    for path in sorted(HERE.glob(f"{series}[0-9]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        title, _, body = docstring.partition("\n")
        yield from (f"## {title}", f"`{path.name}`", body.strip())


def _cures() -> str:
    rows = [f"| `{cure.name}` | {cure.summary} |" for cure in CURES.values()]
    return "\n".join(["| `--cure` | what it does |", "|---|---|", *rows])


if __name__ == "__main__":
    print(page(), end="")
