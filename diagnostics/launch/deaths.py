"""Ways for a training run to die, as data: a death is one entry here and nothing anywhere else.

`code` is run by the victim after its last line. Where a death comes from outside, the victim waits,
and the trial does to it what `blow` says.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    """What a trial does to a victim that waits."""

    NONE = "nothing: it dies by itself"
    KILL = "SIGKILL"
    TERM = "SIGTERM"
    HANG_UP = "the terminal on which the launch was typed is closed"
    KILL_SESSION = "its tmux session is killed"
    KILL_TEE = "the `tee` behind it is killed"
    STOP_PRINTED = "SIGTERM to the process id that the launch printed"


WAIT = "import signal\nwhile True: signal.pause()"
WORKER = (
    "import os, signal, subprocess, sys\n"
    "code = 'import signal; signal.pause()'\n"
    "worker = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
)
CRASH = (
    "import faulthandler, os, signal\nfaulthandler.enable()\nos.kill(os.getpid(), signal.SIGSEGV)"
)
WATCHDOG = (
    "import faulthandler, signal\n"
    "faulthandler.dump_traceback_later(0.05, exit=True)\n"
    "while True: signal.pause()"
)
# It goes on as soon as nobody reads its output any more.
PRINT_AFTER_TEE = (
    "import select\n"
    "poll = select.poll()\n"
    "poll.register(1, 0)\n"
    "poll.poll()\n"
    "print('more', flush=True)"
)
RLIMIT = (
    "import resource\n"
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    "bytearray(1 << 32)"
)
THREAD = (
    "import threading\n"
    "def boom(): raise RuntimeError('in a thread')\n"
    "thread = threading.Thread(target=boom)\n"
    "thread.start(); thread.join()"
)


def _killed_by(name: str) -> str:
    """Code that sends itself this signal, and goes on if it is ignored."""
    return f"import os, signal\nos.kill(os.getpid(), signal.{name})"


@dataclass(frozen=True)
class Death:
    """One way to die.

    `ends`: the status it ends with when nothing interferes, as subprocess has it (-9 for SIGKILL);
    None where that depends on where its output goes. `last_words`: what it then leaves in a log
    that takes standard error, if anything. `needs`: "tmpfs" for a small disk, which takes root.
    `meaning`: in words, where the name needs some.
    """

    name: str
    code: str
    ends: int | None
    last_words: str = ""
    blow: Blow = Blow.NONE
    needs: str = ""
    meaning: str = ""


TRACEBACK = "Traceback (most recent call last)"

DEATHS = {
    death.name: death
    for death in (
        Death("exit 0", "", 0),
        Death("exit 3", "import sys; sys.exit(3)", 3),
        Death("sys.exit(text)", "import sys; sys.exit('bad --lr')", 1, "bad --lr"),
        Death(
            "raises", "raise RuntimeError('boom')", 1, TRACEBACK, meaning="an uncaught exception"
        ),
        Death("a thread raises", THREAD, 0, TRACEBACK),
        Death("MemoryError", RLIMIT, 1, TRACEBACK),
        Death("RecursionError", "def deeper(): deeper()\ndeeper()", 1, TRACEBACK),
        Death("os._exit(3)", "import os; os._exit(3)", 3),
        Death("C exit(3)", "import ctypes; ctypes.CDLL(None).exit(3)", 3),
        Death("abort", "import os; os.abort()", -signal.SIGABRT),
        Death("SIGSEGV", _killed_by("SIGSEGV"), -signal.SIGSEGV),
        Death("SIGSEGV, faulthandler", CRASH, -signal.SIGSEGV, "Fatal Python error"),
        Death("SIGBUS", _killed_by("SIGBUS"), -signal.SIGBUS),
        Death("SIGXCPU", _killed_by("SIGXCPU"), -signal.SIGXCPU),
        Death("SIGINT", _killed_by("SIGINT"), -signal.SIGINT, "KeyboardInterrupt"),
        Death("SIGHUP", _killed_by("SIGHUP"), -signal.SIGHUP),
        Death("SIGTERM", WAIT, -signal.SIGTERM, blow=Blow.TERM),
        Death(
            "SIGKILL",
            _killed_by("SIGKILL"),
            -signal.SIGKILL,
            meaning="as the kernel does when memory runs out",
        ),
        Death("hangs, then SIGKILL", WAIT, -signal.SIGKILL, blow=Blow.KILL),
        Death("hangs, then a watchdog", WATCHDOG, 1, "Timeout ("),
        Death(
            "worker lives",
            WORKER + _killed_by("SIGKILL"),
            -signal.SIGKILL,
            meaning="SIGKILL, while a worker process of the trainer lives on",
        ),
        Death("stdout closed", "import os; os.close(1)\nprint('more')", None),
        Death("disk full", "", None, needs="tmpfs"),
        Death(
            "hang-up",
            WAIT,
            -signal.SIGHUP,
            blow=Blow.HANG_UP,
            meaning="the terminal or connection is lost, and what tee has not read yet",
        ),
        Death("tmux kill-session", WAIT, -signal.SIGHUP, blow=Blow.KILL_SESSION),
        Death("tee killed", PRINT_AFTER_TEE, None, blow=Blow.KILL_TEE),
        Death("kill printed PID", WAIT, -signal.SIGTERM, blow=Blow.STOP_PRINTED),
    )
}


@dataclass(frozen=True)
class Buffering:
    """One way to have, or not to have, Python's output buffered.

    `python` is put in the place of `python3` on the launch line; `output` names one of the victim's
    writers; `variables` are set around the launch.
    """

    name: str
    python: str = "python3"
    output: str = "print"
    variables: tuple[tuple[str, str], ...] = ()


BUFFERINGS = {
    buffering.name: buffering
    for buffering in (
        Buffering("default"),
        Buffering("-u", python="python3 -u"),
        Buffering("PYTHONUNBUFFERED=1", variables=(("PYTHONUNBUFFERED", "1"),)),
        Buffering("PYTHONUNBUFFERED=0", variables=(("PYTHONUNBUFFERED", "0"),)),
        Buffering("PYTHONBUFFERED=1", variables=(("PYTHONBUFFERED", "1"),)),
        Buffering("print(flush=True)", output="flush"),
        Buffering("logging", output="logging"),
        Buffering("line_buffering", output="reconfigure"),
        Buffering("stdbuf -oL", python="stdbuf -oL python3"),
    )
}
