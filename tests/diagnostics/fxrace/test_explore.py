"""How the search of interleavings is run as a child, and what is concluded from its last line."""

import json

import pytest

from diagnostics.probes.fxrace import explore
from diagnostics.verdict import Status


def row(cure, bad, outcome, **more):
    return {
        **{"scenario": "trace-call", "cure": cure, "outcome": outcome},
        **{"schedules": 17, "bad": bad, "complete": True, "preemptions": None},
        **{"bad_set": "", "unclear": "", "seconds": 0.1, "schedule": None},
        "roles": {"A": "traces", "B": "calls"},
        **more,
    }


def report(*rows, outcome="reproduced"):
    return {"outcome": outcome, "reason": "the reason", "torch": "2.13", "rows": list(rows)}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Make the child a program of these lines."""
    monkeypatch.setattr(explore, "reproducer_dir", lambda: tmp_path)
    return lambda *lines: (tmp_path / "explore.py").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("outcome", "exit_code", "status"),
    [
        ("reproduced", 10, Status.PROBLEM),
        ("absent", 0, Status.OK),
        ("cannot tell", 125, Status.UNKNOWN),
    ],
)
def test_the_last_line_decides_and_the_others_are_shown(program, outcome, exit_code, status):
    said = json.dumps(report(outcome=outcome))
    program(
        "import sys", "print(sys.argv[1:])", "print()", f"print({said!r})", f"exit({exit_code})"
    )
    shown = []
    verdict = explore.probe(["--scenario", "trace-op"], shown.append)
    assert shown == ["['--scenario', 'trace-op']", ""]
    assert verdict.status is status
    assert verdict.summary == "torch 2.13, two threads one at a time: the reason"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["raise SystemExit('no torch')"], "exit code 1: no torch"),
        (["import os", "os.kill(os.getpid(), 9)"], "killed by SIGKILL"),
        (["print('no JSON')"], "did not end well"),
        (["print('[1]')"], "did not end well"),
        (["pass"], "did not end well"),
    ],
)
def test_a_search_that_dies_is_not_a_clean_result(program, lines, words):
    program(*lines)
    verdict = explore.probe([], lambda _line: None)
    assert verdict.status is Status.UNKNOWN
    assert words in verdict.summary


def test_a_search_that_hangs_is_killed_with_what_it_forked(program):
    # The forked one holds the pipe open: the probe returns only if that one is killed too.
    program("import os, signal", "os.fork()", "signal.pause()")
    verdict = explore.probe([], lambda _line: None, quiet_s=0.2)
    assert verdict.status is Status.UNKNOWN
    assert "said nothing for too long" in verdict.summary


def test_the_remedy_names_the_cures_that_hold():
    rows = [
        row("none", 14, "reproduced"),
        row("module-class-swap", 14, "reproduced"),
        row("shipped", 0, "absent"),
        row("patcher-isolation", 0, "cannot tell", complete=False),
    ]
    verdict = explore.judge(report(*rows))
    assert verdict.remedy == "trace-call: no schedule fails with shipped"


def test_the_evidence_says_how_far_the_search_went():
    rows = [
        row("none", 14, "reproduced"),
        row("a", 0, "absent", preemptions=2),
        row("b", 0, "cannot tell", complete=False),
        row("c", 0, "cannot tell", complete=False, unclear="blocked"),
    ]
    assert list(explore.judge(report(*rows)).evidence.values()) == [
        "14 of 17 schedules fail, all there are",
        "0 of 17 schedules fail, up to 2 preemptions",
        "0 of 17 schedules fail, not all were run",
        "0 of 17 schedules fail, not all were run: blocked",
    ]


def test_a_replay_is_judged_as_well():
    replayed = {"outcome": "reproduced", "reason": "B: RuntimeError", "torch": "2.13"}
    verdict = explore.judge(replayed)
    assert verdict.status is Status.PROBLEM
    assert verdict.summary.endswith("B: RuntimeError")


def test_a_schedule_that_fails_is_kept_with_what_its_threads_do():
    schedule = {"steps": [["B", "reads"], ["A", "sets"]], "preemptions": 1, "failure": "B: x"}
    verdict = explore.judge(report(row("none", 14, "reproduced", schedule=schedule)))
    (shown,) = verdict.schedules
    assert shown.title == "trace-call, no cure (A traces, B calls)"
    assert shown.lanes == {"A": "traces", "B": "calls"}
    assert shown.steps == (("B", "reads"), ("A", "sets"))
    assert not shown.planted
