"""The trainer was not started, or died unheard: what stood in the way, if it still does."""

import os
import time
from collections.abc import Callable, Collection

from diagnostics.launch import onsite, tmux_session
from diagnostics.launch.finding import Finding, excluded, fits, unknown
from diagnostics.launch.remains import Remains, place_of
from diagnostics.launch.rules import tmux_state


def obstacle(code: str, otherwise: str) -> Callable[[Remains], Finding]:
    """What keeps the log from being made, by the code that `onsite.obstacles` has for it."""

    def look(remains: Remains) -> Finding:
        if remains.log_is_new and code != "disk-full":
            return excluded("the log was made")
        for each, why in onsite.obstacles(str(remains.log)):
            if each == code:
                return fits(why)
        return excluded(otherwise)

    return look


def is_directory(remains: Remains) -> Finding:
    """The shell cannot open a directory for writing."""
    if os.path.isdir(remains.log):
        return fits(f"{remains.log} is a directory")
    return excluded("it is no directory")


def name_taken(remains: Remains) -> Finding:
    """tmux says `duplicate session`, and starts nothing."""
    if remains.session is None:
        return unknown("say --session NAME, if tmux was to have one")
    asked = ("display-message", "-p", "-t", f"={remains.session}:", "#{session_created}")
    created = tmux_session.ask(*asked)
    if not created:
        return excluded(f"tmux has no session {remains.session}")
    when = time.strftime("%F %T", time.localtime(int(created)))
    if not remains.since_was_said:
        return unknown(f"session {remains.session} is there since {when}: was that the launch?")
    assert remains.since is not None
    if int(created) < int(remains.since):
        return fits(f"session {remains.session} was there already, since {when}")
    return excluded(f"session {remains.session} was made by the launch, {when}")


def shell(names: Collection[str], does: str) -> Callable[[Remains], Finding]:
    """tmux hands its command to a shell of one of these names, which does not run it."""

    def look(remains: Remains) -> Finding:
        asked = tmux_session.ask("show-options", "-gv", "default-shell")
        path, where = (asked, "tmux's default-shell") if asked else tmux_state.default_shell()
        if remains.log_is_new:
            return excluded("the log was made")
        if os.path.basename(path) not in names:
            return excluded(f"{where} is {path}")
        if where in tmux_state.LOGIN_SHELL and remains.session is None:
            return unknown(
                f"{where} is {path}, {does}: say --session NAME, if tmux was to have one"
            )
        return fits(f"{where} is {path}, {does}")

    return look


def ended_by_tmux(option: str) -> Callable[[Remains], Finding]:
    """An option ends the session before its shell has opened the log."""

    def look(remains: Remains) -> Finding:
        value, where = tmux_session.option(option)
        if remains.log_is_new:
            return excluded("the log was made")
        if value in {"on", "1"}:
            return fits(f"{where} has {option} on: a detached session ends at once")
        return excluded("it is off")

    return look


# No trace.


def traceless(what: str) -> Callable[[Remains], Finding]:
    """What may always have been, if nothing was opened."""

    def look(remains: Remains) -> Finding:
        if remains.log_is_new or remains.writers:
            return excluded("a log was opened")
        return unknown(what)

    return look


# The log is there, and says nothing; or it says all.


def empty(remains: Remains) -> Finding:
    """The file was opened, and nothing was written."""
    if not remains.log_is_new or remains.log.stat().st_size:
        return excluded("there is no empty log")
    if any(output.place == place_of(remains.log) for _, output in remains.writers):
        return excluded("a process has it open")
    return fits(
        "it is empty and nobody writes to it: killed with everything in its buffer, or never given"
        " a command (quotes lost on the way)"
    )
