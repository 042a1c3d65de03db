"""DL007: the trainer was killed, and the launch ends with status 0.

What happens: `python3 train.py 2>&1 | tee train.log` in a script or a scheduler's job: the trainer
crashes, and the job counts as finished. `set -e` does not stop the script, retries do not retry.

Why: a pipeline's status is that of its last command, and tee did its work.

When harmless: nobody and nothing looks at the status.

Cure: `set -o pipefail` (bash, zsh, ksh), or no pipe: `> train.log 2>&1`.
"""

from __future__ import annotations

import launches


def reproduce(trial: launches.Trial) -> launches.Finding:
    first = "set -o pipefail; " if trial.fixed else ""
    status = trial.launch(f"{first}python3 train.py 2>&1 | tee train.log")
    if trial.kept() is None:
        raise launches.CannotTell("tee left no log")
    evidence = {"status": status, "true_status": 137}
    if status == 0:
        return launches.judged(True, "the trainer was killed; the launch says 0", **evidence)
    return launches.judged(False, f"the launch says {status}", **evidence)


if __name__ == "__main__":
    launches.main("DL007", "tee-hides-status", __doc__, reproduce)
