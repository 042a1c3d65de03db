"""DL001: the log's directory does not exist, and the trainer never starts.

What happens: `bash start.sh > logs/train.log 2>&1` in a detached tmux or under nohup: no process,
no log, no message that anybody sees.

Why: the shell opens the log before it starts anything; where it cannot, it does not start the
program. Its message goes to the shell's own standard error, which a detached session takes along.
With `| tee logs/train.log` it is the other way round: the trainer runs, for days, with no log.

When harmless: never.

Cure: `mkdir -p logs` in front, in the same shell; and look for the first line of output before
leaving.
"""

from __future__ import annotations

import launches


def reproduce(trial: launches.Trial) -> launches.Finding:
    first = "mkdir -p logs && " if trial.fixed else ""
    status = trial.launch(f"{first}python3 train.py > logs/train.log 2>&1", launches.RAISES)
    kept = trial.kept("logs/train.log")
    evidence = {"lines_kept": kept, "status": status}
    if kept is None:
        return launches.judged(True, "the trainer never started: no log, no traceback", **evidence)
    return launches.judged(False, f"the log is there, with {kept} lines", **evidence)


if __name__ == "__main__":
    launches.main("DL001", "missing-directory", __doc__, reproduce)
