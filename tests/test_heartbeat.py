"""The heartbeat file: what loops write is what others read, also after the writer was killed."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from dflash import heartbeat
from dflash.heartbeat import EVENTS, NO_LIMIT, Heartbeat, started, waiting, working


@pytest.fixture
def beats(tmp_path):
    return Heartbeat(tmp_path / "beats", ["a", "b"], start_limit_s=100.0, limit_s=10.0)


def loop(path, name):
    return {loop.name: loop for loop in heartbeat.read(path).loops}[name]


def test_what_a_loop_says_is_read(beats):
    seen = []

    def body():
        for act in (lambda: working("batch 1"), lambda: waiting("item 2"), started):
            act()
            seen.append(loop(beats.path, "a"))
        working("batch 3")
        seen.append(loop(beats.path, "a"))

    beats.run("a", body)
    said = [(at.phase, at.limit_s) for at in seen]
    assert said == [
        ("batch 1", 100.0),
        ("waits for item 2", NO_LIMIT),
        ("waits for item 2", NO_LIMIT),
        ("batch 3", 10.0),
    ]
    assert (loop(beats.path, "a").phase, loop(beats.path, "b").phase) == ("ended", "not started")


def test_a_loop_that_raises_has_ended(beats):
    with pytest.raises(ZeroDivisionError):
        beats.run("a", lambda: 1 / 0)
    assert loop(beats.path, "a").phase == "ended"


def test_only_work_can_be_overdue(beats):
    def body():
        working("x")
        at_work = loop(beats.path, "a")
        waiting("y")
        at_rest = loop(beats.path, "a")
        assert not at_work.is_overdue(at_work.since_s + 99)
        assert at_work.is_overdue(at_work.since_s + 101)
        assert not at_rest.is_overdue(at_rest.since_s + 1e9)

    beats.run("a", body)


def test_outside_of_a_loop_nothing_is_written(beats):
    working("x")
    waiting("y")
    started()
    assert {loop.phase for loop in heartbeat.read(beats.path).loops} == {"not started"}


def test_the_last_events_of_all_loops_are_kept_in_order(beats):
    def body():
        for i in range(EVENTS):
            working(f"batch {i}")

    threads = [threading.Thread(target=beats.run, args=(name, body)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = heartbeat.read(beats.path).events
    assert len(events) == EVENTS
    of_a = [int(e.text.split()[1]) for e in events if e.loop == "a" and e.text.startswith("batch")]
    assert of_a == sorted(of_a)
    assert events[-1].text == "ended"


def test_long_words_are_cut_and_any_language_is_read(beats):
    beats.run("a", lambda: (working("ü" * 100), assert_cut(loop(beats.path, "a").phase)))


def assert_cut(phase):
    assert phase.rstrip("\N{REPLACEMENT CHARACTER}") == "ü" * 44


def test_it_is_the_users_own(beats):
    assert stat.S_IMODE(beats.path.stat().st_mode) == 0o600


def test_another_file_is_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match="is no heartbeat file"):
        heartbeat.read(tmp_path / "other")


def test_it_outlives_a_sigkill(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dflash.heartbeat import Heartbeat, working\n"
        "beats = Heartbeat(Path(sys.argv[1]), ['a'], start_limit_s=1.0, limit_s=1.0)\n"
        "beats.run('a', lambda: (working('batch 7'), os.kill(os.getpid(), signal.SIGKILL)))\n"
    )
    path = tmp_path / "beats"
    child = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert child.returncode == -signal.SIGKILL
    snapshot = heartbeat.read(path)
    assert snapshot.loops[0].phase == "batch 7"
    assert [event.text for event in snapshot.events] == ["not started", "starting", "batch 7"]
    assert not snapshot.is_alive


def test_a_reused_pid_is_not_taken_for_the_run(beats):
    snapshot = heartbeat.read(beats.path)
    assert snapshot.is_alive and snapshot.pid == os.getpid()
    assert heartbeat.process_start(2**22 + 1) is None


def test_a_new_run_does_not_disturb_who_reads_the_old_file(beats):
    before = heartbeat.read(beats.path)
    Heartbeat(beats.path, ["c"], start_limit_s=1.0, limit_s=1.0)
    assert [loop.name for loop in before.loops] == ["a", "b"]
    assert [loop.name for loop in heartbeat.read(beats.path).loops] == ["c"]
