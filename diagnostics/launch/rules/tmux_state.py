"""What tmux would do on this machine: asked, never changed."""

import os
import pwd
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ANSWER_S = 5.0
NO_SHELL = {"nologin", "false", "true"}
C_SHELLS = {"csh", "tcsh", "bsd-csh"}
LOGIN_SHELL = ("$SHELL", "the password file")  # where no setting of tmux says which shell


def session_exists(name: str) -> bool:
    """Whether the user's default server has a session of exactly this name."""
    try:
        asked = subprocess.run(
            ["tmux", "has-session", "-t", f"={name}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def settings(extra: Path | None = None) -> Iterator[tuple[Path, int, str]]:
    """The lines of tmux's configuration files: path, number, text. `extra` replaces the user's."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    users = [Path.home() / ".tmux.conf", Path(config) / "tmux" / "tmux.conf"]
    for path in [Path("/etc/tmux.conf"), *([extra] if extra else users)]:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        yield from ((path, number, line) for number, line in enumerate(lines, 1))


def option(name: str, extra: Path | None = None) -> tuple[str, str]:
    """The last value of an option and where it is set; two empty strings if nowhere."""
    found = ("", "")
    for path, number, line in settings(extra):
        set_to = re.match(
            rf"\s*set(?:-option|-window-option|w)?\s+(?:-\w+\s+)*{name}\s+(\S+)", line
        )
        if set_to:
            found = (set_to[1].strip("\"'"), f"{path}:{number}")
    return found


def default_shell(extra: Path | None = None) -> tuple[str, str]:
    """The shell that reads tmux's commands, and who says so."""
    value, where = option("default-shell", extra)
    if value:
        return value, where
    if shell := os.environ.get("SHELL"):
        return shell, LOGIN_SHELL[0]
    try:
        return pwd.getpwuid(os.getuid()).pw_shell, LOGIN_SHELL[1]
    except KeyError:
        return "/bin/sh", "tmux"
