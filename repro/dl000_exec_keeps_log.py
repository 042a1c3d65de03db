"""DL000: a script that ends in exec loses its log (a control: it does not).

What happens: a run launched with `bash start.sh > train.log 2>&1`, where start.sh ends in
`exec python3 train.py`, was found without a log, and exec was blamed.

Why not: the outer shell opens the log before it starts start.sh, and exec replaces the program,
not its open files. What a kill takes is Python's own buffer, with exec and without it: DL011. A log
that is absent altogether has another cause: a missing directory (DL001), a relative path, a log
opened elsewhere (DL027), a session that was never made.

When harmless: this program must say "absent"; otherwise this shell does something new.

Cure: none is needed; exec is even right, as signals and the process id are then the trainer's.
`--fixed` leaves exec out, and the log has exactly the same lines.
"""

from __future__ import annotations

import launches


def reproduce(trial: launches.Trial) -> launches.Finding:
    trial.path("start.sh").write_text(f"{'' if trial.fixed else 'exec '}python3 train.py\n")
    status = trial.launch("bash start.sh > train.log 2>&1")
    kept = trial.kept()
    evidence = {"lines_kept": kept, "lines_written": launches.LINES, "status": status}
    if kept is None:
        return launches.judged(True, "there is no log", **evidence)
    reason = f"the log is there, with {kept} of {launches.LINES} lines: buffering took the others"
    return launches.judged(False, reason, **evidence)


if __name__ == "__main__":
    launches.main("DL000", "exec-keeps-log", __doc__, reproduce)
