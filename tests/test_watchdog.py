"""The watchdog's own decisions, without a trainer: who is late, who is merely slow."""

import json

import pytest

from dflash import heartbeat, watchdog
from dflash.heartbeat import Heartbeat, started, waiting, working
from dflash.watchdog import Watch


@pytest.fixture
def watch(tmp_path, monkeypatch, capsys):
    """(heartbeat, look once and return what was said)."""
    beats = Heartbeat(tmp_path / heartbeat.FILE, ["a", "b"], start_limit_s=100.0, limit_s=1e-9)
    monkeypatch.setattr(watchdog, "_classified", lambda _directory, file: file.write(b"ok: fine\n"))
    looking = Watch(tmp_path, abort=False, grace_s=1.0)

    def look():
        looking.tick()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return beats, look


def test_a_slow_start_is_told_now_and_then_and_is_no_hang(watch, monkeypatch):
    beats, look = watch
    monkeypatch.setattr(watchdog, "PROGRESS_S", 0.0)
    with beats.loop("a"):
        working("compiling for 1024 context tokens, 1 of 4")
        (said,) = look()
    assert (said["kind"], said["loop"]) == ("progress", "a")
    assert said["phase"] == "compiling for 1024 context tokens, 1 of 4"


def test_before_its_time_nothing_is_said(watch):
    beats, look = watch
    with beats.loop("a"):
        working("x")
        assert look() == []


def test_a_late_loop_is_reported_once_with_its_stacks(watch, tmp_path):
    beats, look = watch
    with beats.loop("a"):
        started()
        working("batch 7")
        (said,) = look()
        assert look() == []
        working("batch 8")
        assert [again["phase"] for again in look()] == ["batch 8"]
    assert (said["kind"], said["loop"], said["phase"]) == ("stuck", "a", "batch 7")
    assert said["summary"] == "ok: fine"
    assert len(list(tmp_path.glob("stacks-*.txt"))) == 2


def test_who_waits_is_never_late(watch):
    beats, look = watch
    with beats.loop("a"):
        started()
        waiting("item 3")
        assert look() == []


def test_the_first_of_several_late_ones_is_named(watch):
    beats, look = watch
    with beats.loop("b"):
        started()
        working("first")
    # Written by hand, since a thread is one loop only.
    first, second = (heartbeat._Slot(beats, name) for name in ("b", "a"))
    first.write("first", 1e-9)
    second.write("second", 1e-9)
    (said,) = look()
    assert said["loop"] == "b"
