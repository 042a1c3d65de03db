"""Each kind of hang in a real process: told from all the others, on every Python that is here."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from diagnostics.stacks import pyspy
from diagnostics.stacks.states import classify
from diagnostics.stacks.verdict import judge
from diagnostics.verdict import Status, Verdict

PROGRAM = Path(__file__).with_name("programs") / "hangs.py"
SETTLES_S = 20.0

# Kind of hang -> the verdict's code, and words of its sentence.
KINDS = {
    "lock_pair": ("lock-cycle", "a, b wait for locks that they hold among themselves (suspicion)"),
    "barrier": (
        "barrier-party-missing",
        "at a barrier (the same one); warmup-2 is (are) gone",
    ),
    "dead_producer": ("queue-empty", "consumer-0, consumer-1 waits for an item in a queue"),
    "dead_consumer": ("queue-full", "producer waits for room in a queue"),
    "queue_join": ("queue-join", "closer waits for a queue's items to be done"),
    "event": ("event-never-set", "waiter waits for an event"),
    "idle_pool": ("event-never-set", "waiter waits for an event"),
    "ended_main": ("barrier-party-missing", "party-0, party-1 waits at a barrier (the same one)"),
    "condition": ("condition-never-notified", "waiter waits for a condition"),
    "semaphore": ("semaphore", "waiter waits for a semaphore"),
    "join_cycle": ("join-cycle", " waits for "),
    "gil": ("gil-held", "holder holds the GIL in C code"),
    "native_mutex": ("native-mutex", "waiter wait(s) for a mutex of C code that owner hold(s)"),
    "forked": ("lock-without-owner", "left behind by a fork (suspicion)"),
    "pipe_full": ("pipe-full", "writer waits to write (pipe:["),
    "socket_read": ("awaits-input", "client waits to read (socket:["),
    "child": ("awaits-child", "parent waits for a child process"),
    "uninterruptible": ("uninterruptible", "MainThread: in uninterruptible sleep"),
    "stopped": ("stopped", "the process is stopped"),
    "sleeping": ("sleeps", "sleeper"),
    "computing": ("goes-on", "worker run(s)"),
}


def pythons():
    """Other versions of Python that lie about: on PATH, or where pyenv puts them."""
    found = {}
    for minor in range(8, 16):
        name = f"python3.{minor}"
        places = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"), shutil.which(name)]
        working = [str(place) for place in places if place and runs(place)]
        if working and minor != sys.version_info.minor:
            found[name] = working[0]
    return found


def runs(python):
    """A shim of pyenv need not lead to any."""
    return subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0


OTHERS = pythons()


@pytest.fixture
def hang(tmp_path):
    """Start the program and return the pid that hangs; afterwards nothing of it is left."""
    children = []

    def start(kind, python=sys.executable):
        command = [python, str(PROGRAM), kind, str(tmp_path / "fifo")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        children.append(child)
        words = child.stdout.readline().split()
        assert words, f"{command} ended without a word"
        return int(words[1]) if words[0] == "pid" else child.pid

    yield start
    for child in children:
        for process in [*psutil.Process(child.pid).children(recursive=True), child]:
            process.kill()
        child.wait(30)


def settled(pid, code, within_s=SETTLES_S):
    """The verdict, looked at again until it is the expected one: the last words come early."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            verdict = judge(list(map(classify, pyspy.sample(pid))))
        except pyspy.Refused as refusal:
            verdict = Verdict(Status.UNKNOWN, "no-stacks", str(refusal))
        if verdict.code == code or time.monotonic() > deadline_s:
            return verdict


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_told_from_the_others(hang, kind):
    code, words = KINDS[kind]
    verdict = settled(hang(kind), code)
    assert verdict.code == code, (verdict.summary, verdict.evidence)
    assert words in verdict.summary
    assert (verdict.status is Status.OK) == (code in ("sleeps", "goes-on"))


# One who may go on -> the verdict's code, and what is said of that one.
MAY_GO_ON = {
    "event_with_a_limit": ("event-never-set", "waiter wait(s) for a limited time only"),
    "lock_with_a_limit": ("lock-without-owner", "waiter wait(s) for a limited time only"),
    "lock_of_one_who_goes_on": ("lock-without-owner", "holder wait(s) for a limited time only"),
    "event_of_a_signal": ("event-never-set", "the handler of a signal may set it"),
}


@pytest.mark.parametrize("kind", MAY_GO_ON)
def test_who_may_go_on_is_not_called_stuck(hang, kind):
    code, words = MAY_GO_ON[kind]
    verdict = settled(hang(kind), code)
    assert (verdict.code, verdict.status) == (code, Status.UNKNOWN), verdict.summary
    assert words in verdict.summary
    # The control: the same without a limit, and without a handler.
    assert settled(hang("event"), "event-never-set").status is Status.PROBLEM


def test_who_waits_for_anothers_end_excuses_nobody(hang):
    verdict = settled(hang("joined_with_a_limit"), "queue-empty")
    assert (verdict.code, verdict.status) == ("queue-empty", Status.PROBLEM), verdict.summary


def test_looking_does_not_stop_the_process(hang):
    """In uninterruptible sleep a blocking dump would hang, and hold all threads up with it."""
    pid = hang("uninterruptible")
    settled(pid, "uninterruptible")
    assert psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
    status = Path(f"/proc/{pid}/status").read_text()
    assert "TracerPid:\t0\n" in status


@pytest.mark.parametrize("name", OTHERS or [pytest.param("", marks=pytest.mark.skip("no other"))])
def test_on_other_pythons_nothing_is_told_wrong(hang, name):
    """`unknown` is allowed there, another hang's name is not."""
    told = {}
    for kind in ANYWHERE:
        verdict = settled(hang(kind, OTHERS[name]), KINDS[kind][0], within_s=4.0)
        right = verdict.code == KINDS[kind][0]
        told[kind] = "right" if right else f"{verdict.status}: {verdict.code}: {verdict.summary}"
    wrong = {kind: said for kind, said in told.items() if said.startswith(("problem", "ok"))}
    print(f"{name}: {Counter(said.partition(':')[0] for said in told.values())}")
    assert not wrong


# A few that differ between versions; all of them are run on this one.
ANYWHERE = ("lock_pair", "barrier", "dead_producer", "event", "join_cycle", "gil", "computing")
