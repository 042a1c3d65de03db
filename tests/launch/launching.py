"""Launching for real, with a state directory and a tmux server of the test's own."""

import os
import sys
from contextlib import suppress

from diagnostics.launch import family, journal, launcher, onsite, status

PYTHON = (sys.executable, "-S", "-c")
WITHIN_S = 30
STAY = "print('step 1')\nimport signal\nsignal.pause()"
TELL = """
import signal
for name in ('TERM', 'INT', 'HUP', 'USR1', 'USR2'):
    signal.signal(getattr(signal, f'SIG{name}'), lambda number, _: print('got', number))
print('ready')
while True: signal.pause()
"""
SETSID_WORKER = """
import os, signal
print('step 1')
if os.fork() == 0:
    os.setsid()
    while True: signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""


def launch(code, *, name="train", log="train.log", patience_s=WITHIN_S, ends=False, **wish):
    """The verdict of a launch of this Python code; with `ends`, when its end was written down."""
    command = (*PYTHON, code) if isinstance(code, str) else tuple(code)
    wanted = launcher.Wish(name, command, log, patience_s=patience_s, **wish)
    verdict = launcher.probe(wanted, show=lambda line: None)
    if not ends:
        return verdict
    assert family.wait_until(lambda: "exit" in stages(name), WITHIN_S), verdict
    return status.probe(name)


def stages(name="train"):
    """What is written down of the last launch."""
    return journal.last_run(journal.journal_of(name))


def wait_for(code, name="train"):
    """The launch's verdict, as soon as it is this one."""
    assert family.wait_until(lambda: status.probe(name).code == code, WITHIN_S), status.probe(name)
    return status.probe(name)


def end(stage, number, name="train"):
    """Send a signal to the process of a stage, and wait until it is gone if that kills it."""
    process = stages(name)[stage]
    os.kill(process["pid"], number)
    if number == 9:
        assert family.wait_until(lambda: not onsite.is_alive(process), WITHIN_S)


def end_all():
    """Whatever the launches of this state directory have left."""
    for name in journal.names():
        for record in journal.records(journal.journal_of(name)):
            for process in (record, *record.get("left", ())):
                mine = process.get("pid") in {None, os.getpid()}
                if not mine and "start_ticks" in process and onsite.is_alive(process):
                    with suppress(ProcessLookupError):
                        os.kill(process["pid"], 9)
