"""The tmux session of a launch: started without a shell, kept when it ends, asked how it ended."""

import shutil
import subprocess
import time
from collections.abc import Sequence

from diagnostics.launch.rules import tmux_state

ANSWER_S = 15.0
DEAD_S = 5.0  # for tmux to notice that a supervisor has ended
RUN = "@dflash_run"  # whose launch a session is
ENDS_IT = ("destroy-unattached", "exit-unattached")


def ask(*words: str) -> str | None:
    """What tmux answers; None if it refuses, is not there, or does not answer."""
    ended = _call(words)
    return ended.stdout.strip() if ended is not None and ended.returncode == 0 else None


def option(name: str) -> tuple[str, str]:
    """A global option's value and who says so: a server that runs, else the configuration.

    No server is started for that: one without a session ends at once, and takes with it whoever
    meets it then.
    """
    value = ask("show-options", "-gv", name)
    return (value, "tmux") if value else tmux_state.option(name)


def _call(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            ["tmux", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def why_not(name: str, own: set[str]) -> str | None:
    """Why no session of this name can be had, or None.

    Args:
        own: runs that are over; their dead session, kept to be looked at, makes room.
    """
    if shutil.which("tmux") is None:
        return "tmux is not installed"
    for name_of_option in ENDS_IT:
        value, where = option(name_of_option)
        if value not in {"", "off", "0"}:
            return f"{where} has {name_of_option} {value}: it would end the session at once"
    if (panes := _panes(name)) is None:
        return None
    deadline_s = time.monotonic() + DEAD_S
    while not all(dead == "1" for dead, run in panes if run in own):
        if time.monotonic() > deadline_s:
            break
        ask("run-shell", "true")  # see pane_end
        panes = _panes(name) or []
    if not all(dead == "1" and run in own for dead, run in panes):
        return f"tmux has a session {name} already, and it is not a launch's that is over"
    return None


def _panes(name: str) -> list[tuple[str, str]] | None:
    """Of a session: `1` if it is dead, and whose launch it is; None if there is no session."""
    answer = ask("list-panes", "-s", "-t", f"={name}", "-F", f"#{{pane_dead}} #{{{RUN}}}")
    if answer is None:
        return None
    return [(line[:1], line[2:]) for line in answer.splitlines()]


def start(name: str, command: Sequence[str], cwd: str, run: str) -> str | None:
    """A detached session that runs these words, in the place of a dead one of this name.

    Returns what tmux says if it does not. One call: a server that has lost its last session ends,
    and whoever meets it then is lost with it.
    """
    window = ("-t", f"={name}:")
    dead = ("kill-session", "-t", f"={name}", ";") if _panes(name) is not None else ()
    ended = _call(
        (
            *dead,
            *("new-session", "-d", "-s", name, "-c", cwd, *command),
            *(";", "set-option", "-w", *window, "remain-on-exit", "on"),
            *(";", "set-option", *window, RUN, run),
        )
    )
    if ended is None:
        return "tmux does not answer"
    return None if ended.returncode == 0 else ended.stderr.strip()


def screen(name: str) -> str:
    """What the session shows, as far as it is there."""
    return ask("capture-pane", "-p", "-J", "-t", f"={name}:") or ""


def pane_end(pane: str, run: str) -> str:
    """How the process of this launch's pane ended, in words; empty if tmux does not know."""
    # A tmux built with libutempter misses deaths (tmux#311) until another child of it ends.
    ask("run-shell", "true")
    asked = f"#{{{RUN}}} #{{pane_dead_status}} -#{{pane_dead_signal}}"
    answer = ask("display-message", "-p", "-t", pane, asked) or ""
    whose, _, numbers = answer.partition(" ")
    status, _, signal = numbers.partition(" -")
    if whose != run or not (status or signal):
        return ""
    return f"exit status {status}" if status else f"signal {signal}"
