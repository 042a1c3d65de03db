"""Run reproducers as programs in forked children of one process that has imported torch.

Each argument is a reproducer's file and its options, quoted as for a shell. Prints for each in turn
a JSON line: its exit status and what it printed.
"""

import json
import os
import runpy
import shlex
import sys
from pathlib import Path

REPRO = Path(__file__).parents[2] / "repro"
sys.path.insert(0, str(REPRO))

import harness  # noqa: E402, F401  (before torch: it makes the caches cold)
import torch._dynamo  # noqa: E402, F401


def program(path, *options):
    """Become the program; never returns."""
    sys.argv = [path, *options]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def run(words):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        program(*words)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "said": said}


for argument in sys.argv[1:]:
    print(json.dumps(run(shlex.split(argument))), flush=True)
