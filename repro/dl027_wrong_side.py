"""DL027: the log is opened on the host, and the trainer runs in a container.

What happens: `pct exec 200 -- python3 train.py > /workspace/train.log`: inside the container, where
one looks, there is no /workspace/train.log. On the host there is one, beside nothing else.

Why: a redirect belongs to the shell that reads it. Outside the quotes that is the host's.

When harmless: the log is meant to lie on the host, and the connection outlives the run.

Cure: put it inside the quotes of the container's shell:
`pct exec 200 -- bash -c 'exec python3 train.py > /workspace/train.log 2>&1'`.

Here a mount namespace stands in for the container: its workspace has a file system of its own.
"""

from __future__ import annotations

import subprocess

import launches

# Enter the container, run what is behind it, and say whether the log is there, inside.
ENTER = """\
mount -t tmpfs none workspace || exit 125
"$@"
test -e workspace/train.log && echo yes > seen-inside || echo no > seen-inside
"""


def reproduce(trial: launches.Trial) -> launches.Finding:
    _needs_namespaces()
    trial.path("workspace").mkdir()
    trial.path("enter").write_text(ENTER)
    container = "unshare --mount --map-root-user sh enter"
    program, redirect = "exec python3 train.py", "> workspace/train.log 2>&1"
    if trial.fixed:
        line = f"{container} bash -c '{program} {redirect}'"
    else:
        line = f"{container} bash -c '{program}' {redirect}"
    trial.launch(line)
    if not trial.path("seen-inside").exists():
        raise launches.CannotTell("nothing could be mounted in the namespace")
    inside = trial.path("seen-inside").read_text().strip() == "yes"
    on_host = trial.path("workspace/train.log").exists()
    evidence = {"log_in_container": inside, "log_on_host": on_host}
    if not inside:
        return launches.judged(True, "the container has no log; the host has it", **evidence)
    return launches.judged(False, "the log is where the trainer runs", **evidence)


def _needs_namespaces() -> None:
    command = ["unshare", "--mount", "--map-root-user", "true"]
    launches.needs("unshare")
    if subprocess.run(command, capture_output=True).returncode:
        raise launches.CannotTell("mount namespaces are not allowed here")


if __name__ == "__main__":
    launches.main("DL027", "wrong-side", __doc__, reproduce)
