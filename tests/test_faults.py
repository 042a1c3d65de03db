"""A process that writes its own stacks: whatever its threads do, and without harm to them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import faults

ROOT = Path(__file__).parents[1]
START = """
import ctypes, faulthandler, signal, sys, threading
from pathlib import Path
from dflash import faults

def deep(depth):
    return depth and deep(depth - 1)

def go_on():
    while True:
        deep(400)

def told_to_begin():
    print("ready", flush=True)
    input()
"""
GOES_ON = """
for _ in range(4):
    threading.Thread(target=go_on, daemon=True).start()
"""
OURS = "with faults.stacks_on_signal(Path(sys.argv[1])): told_to_begin()"
FAULTHANDLERS = """
file = open(Path(sys.argv[1]) / faults.FILE, "w")
faulthandler.register(faults.SIGNAL, file=file, all_threads=True)
told_to_begin()
"""
IN_C = """
def hold_the_gil():
    ctypes.PyDLL(None).system(b"echo ready; read line")

with faults.stacks_on_signal(Path(sys.argv[1])):
    thread = threading.Thread(target=hold_the_gil)
    thread.start()
    thread.join()
"""


@pytest.fixture
def started(tmp_path):
    """A function that starts a program, and waits until it is ready."""
    children = []

    def start(program):
        child = subprocess.Popen(
            [sys.executable, "-c", START + program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        children.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def signals_until_it_dies(child, directory, most):
    """Ask again as soon as the stacks are there; how many it took, or `most`."""
    for asked in range(most):
        before = faults.size(directory)
        child.send_signal(faults.SIGNAL)
        while faults.size(directory) == before:
            if child.poll() is not None:
                return asked
    return most


def test_threads_that_go_on_are_not_harmed(started, tmp_path):
    child = started(GOES_ON + OURS)
    assert signals_until_it_dies(child, tmp_path, 200) == 200
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    stacks = (tmp_path / faults.FILE).read_text()
    assert "in deep" in stacks
    assert "in told_to_begin" in stacks


def test_the_control_faulthandlers_own_handler_ends_the_process(started, tmp_path):
    child = started(GOES_ON + FAULTHANDLERS)
    assert signals_until_it_dies(child, tmp_path, 5000) < 5000
    assert child.returncode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)


def test_it_answers_while_c_code_holds_the_gil(started, tmp_path, monkeypatch):
    child = started(IN_C)
    monkeypatch.setattr(faults, "LIMIT_S", 1.0)
    with monkeypatch.context() as without:  # the control
        without.setattr(faults, "WHILE_C_HOLDS_THE_GIL", faults.SIGNAL)
        assert faults.ask(child.pid, tmp_path) == ""
    assert "in hold_the_gil" in faults.ask(child.pid, tmp_path)
    assert child.poll() is None


def test_a_process_that_is_stopped_is_not_asked(started, tmp_path):
    child = started(OURS)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert faults.ask(child.pid, tmp_path) == ""
    child.send_signal(signal.SIGCONT)
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    assert faults.size(tmp_path) == 0


def test_what_was_there_before_is_put_back(tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    with faults.stacks_on_signal(tmp_path):
        os.kill(os.getpid(), faults.SIGNAL)
    assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert "in test_what_was_there_before_is_put_back" in (tmp_path / faults.FILE).read_text()
