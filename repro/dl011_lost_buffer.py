"""DL011: the last lines before the death are not in the log.

What happens: the trainer is killed (by the kernel when memory runs out, by a scheduler, by a crash
in C code, by os._exit), and the log ends long before that. A hang shows nothing at all.

Why: into a file or a pipe Python writes when its buffer is full: 8 KiB, since Python 3.14 128 KiB.
What is in the buffer dies with the process. tee does not help: the lines never reached the pipe.
faulthandler adds its own message, and does not flush. `stdbuf` changes C's buffers, not Python's.

When harmless: everything goes through `logging`, or is printed with `flush=True`.

Cure: `python -u` or PYTHONUNBUFFERED=1 (not 0, and spelt so).
"""

from __future__ import annotations

import launches


def reproduce(trial: launches.Trial) -> launches.Finding:
    unbuffered = " -u" if trial.fixed else ""
    status = trial.launch(f"exec python3{unbuffered} train.py > train.log 2>&1")
    kept = trial.kept()
    if kept is None or status != 137:
        raise launches.CannotTell(f"the trainer was not killed as planned: status {status}")
    lost = launches.LINES - kept
    evidence = {"lines_kept": kept, "lines_written": launches.LINES}
    return launches.judged(lost > 0, f"{lost} of {launches.LINES} lines are lost", **evidence)


if __name__ == "__main__":
    launches.main("DL011", "lost-buffer", __doc__, reproduce)
