"""Every mechanism known to leave no log, and what to do about it: one entry each, in order.

First the processes that still run, as they show the most; then what stood in the way of a start;
then what leaves no trace; last who keeps a GPU busy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from diagnostics.launch import gpu_keepers, never_started, still_running
from diagnostics.launch.finding import Finding
from diagnostics.launch.remains import Remains
from diagnostics.launch.rules import tmux_state


@dataclass(frozen=True)
class Mechanism:
    """`code` is stable; `explains`: `log`, that there is none; `tail`, that its end is
    missing, too; `gpu`, only that one is busy.
    """

    code: str
    look: Callable[[Remains], Finding]
    remedy: str
    explains: str = "log"


COPY = "Copy it back: add --recover FILE"
AGAIN = "Launch with dflash-diag launch, which writes down every stage."

MECHANISMS = (
    Mechanism("other-namespace", still_running.other_namespace, COPY),
    Mechanism("log-deleted", still_running.deleted, COPY),
    Mechanism("mounted-over", still_running.mounted_over, COPY),
    Mechanism("bound-outside", still_running.bound_outside, COPY),
    Mechanism(
        "csh-file", still_running.csh_file, "Read that file. Let bash run the line: bash -c '...'"
    ),
    Mechanism(
        "relative-path",
        still_running.other_directory,
        "Read that file. Write the log's whole path.",
    ),
    Mechanism(
        "tee-without-file",
        still_running.tee_without_file,
        "Make the directory before the next launch.",
    ),
    Mechanism(
        "other-output",
        still_running.other_output,
        "Its output went there; redirect it at the next launch.",
    ),
    Mechanism(
        "buffered",
        still_running.buffered,
        "See what it does: dflash-diag stacks PID. At the next launch: python -u",
    ),
    Mechanism(
        "directory-missing",
        never_started.obstacle("directory-missing", "it is there now"),
        "mkdir -p it, and launch again.",
    ),
    Mechanism("is-directory", never_started.is_directory, "Name a file in it."),
    Mechanism(
        "read-only",
        never_started.obstacle("read-only", "it can be written now"),
        "Mount it for writing, or log elsewhere.",
    ),
    Mechanism(
        "not-writable",
        never_started.obstacle("not-writable", "you may write there now"),
        "Log where you may write.",
    ),
    Mechanism(
        "no-inodes",
        never_started.obstacle("no-inodes", "inodes are left now"),
        "Delete files there, or log elsewhere.",
    ),
    Mechanism(
        "disk-full",
        never_started.obstacle("disk-full", "there is room now"),
        "Make room, or log elsewhere.",
        "tail",
    ),
    Mechanism("name-taken", never_started.name_taken, "End that session, or take another name."),
    Mechanism(
        "shell-runs-nothing",
        never_started.shell(tmux_state.NO_SHELL, "which runs no command"),
        "tmux set -g default-shell /bin/bash",
    ),
    Mechanism(
        "shell-is-csh",
        never_started.shell(tmux_state.C_SHELLS, "to which `> log 2>&1` is an ambiguous redirect"),
        "tmux set -g default-shell /bin/bash",
    ),
    Mechanism(
        "destroy-unattached",
        never_started.ended_by_tmux("destroy-unattached"),
        "tmux set -g destroy-unattached off",
    ),
    Mechanism(
        "exit-unattached",
        never_started.ended_by_tmux("exit-unattached"),
        "tmux set -g exit-unattached off",
    ),
    Mechanism("log-empty", never_started.empty, f"Run python -u. {AGAIN}"),
    Mechanism(
        "no-terminal",
        never_started.traceless("tmux without -d and without a terminal leaves no trace"),
        AGAIN,
    ),
    Mechanism(
        "killed-early", never_started.traceless("a kill before the redirect leaves no trace"), AGAIN
    ),
    Mechanism(
        "nohup-race", never_started.traceless("a hang-up before nohup acts leaves no trace"), AGAIN
    ),
    Mechanism("worker-left", gpu_keepers.worker_left, "If it is yours, and over: kill PID", "gpu"),
    Mechanism("leftover", gpu_keepers.leftover, "If it is yours, and over: kill PID", "gpu"),
    Mechanism(
        "ghost",
        gpu_keepers.ghost,
        "Look from the host, as root: nvidia-smi; fuser -v /dev/nvidia*",
        "gpu",
    ),
)
