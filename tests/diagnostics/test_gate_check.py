"""How the search of the start-up gate is run as a child, and what is concluded from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.probes import gate_check
from diagnostics.verdict import Status

ROOT = Path(__file__).parents[2]


def row(**more):
    return {
        **{"scenario": "healthy", "size": "2+1+0", "how": "reduced", "bug": "", "runs": 9},
        **{"outcome": "absent", "preemptions": None, "states": 7, "ended": 3, "failing": 0},
        **{"complete": True, "unclear": "", "seconds": 0.1, "failure": None, "ends": ["finished"]},
        **{"what": "", "schedule": None},
        **more,
    }


def report(*rows, outcome="absent"):
    return {"outcome": outcome, "reason": "the reason", "rows": list(rows), "seconds": 4.2}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Make the child a program of these lines."""
    monkeypatch.setattr(gate_check, "reproducer_dir", lambda: tmp_path)
    return lambda *lines: (tmp_path / gate_check.PROGRAM).write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("outcome", "exit_code", "status"),
    [
        ("reproduced", 10, Status.PROBLEM),
        ("absent", 0, Status.OK),
        ("cannot tell", 125, Status.UNKNOWN),
    ],
)
def test_the_last_line_decides_and_the_others_are_shown(program, outcome, exit_code, status):
    said = json.dumps(report(row(), outcome=outcome))
    program("import sys", "print(sys.argv[1:])", f"print({said!r})", f"exit({exit_code})")
    shown = []
    verdict, found = gate_check.probe(["--quick"], shown.append)
    assert shown == ["['--quick']"]
    assert verdict.status is status
    assert verdict.summary == "the reason, in 4 s"
    assert found["rows"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["raise SystemExit('no dflash')"], "exit code 1: no dflash"),
        (["import os", "os.kill(os.getpid(), 9)"], "killed by SIGKILL"),
        (["print('no JSON')"], "did not end well"),
        (["import os, signal", "os.fork()", "signal.pause()"], "said nothing for too long"),
    ],
)
def test_a_search_that_dies_or_hangs_is_not_a_clean_result(program, lines, words):
    program(*lines)
    verdict, found = gate_check.probe([], lambda _line: None, quiet_s=1.0)
    assert verdict.status is Status.UNKNOWN
    assert words in verdict.summary
    assert found == {}


def test_what_the_program_does_not_take_is_a_usage_error():
    result = CliRunner().invoke(main, ["gate-check", "--scenario", "prayer"])
    assert result.exit_code == 2
    assert "healthy" in result.output


def test_nothing_searched_is_not_a_clean_result():
    result = CliRunner().invoke(main, ["gate-check", "--quick", "--scenario", "prefetch-raises"])
    assert result.exit_code == 3, result.output


@pytest.mark.parametrize("options", [["--quick", "--full"], ["--junit", "/no/such/file.xml"]])
def test_usage(options):
    assert CliRunner().invoke(main, ["gate-check", *options]).exit_code == 2


def test_a_failing_scenario_is_named_in_the_remedy():
    schedule = {"steps": [["main", "waits"]], "preemptions": 1, "failure": "P2: x"}
    bad = row(scenario="hangs", failing=2, outcome="reproduced", schedule=schedule)
    verdict = gate_check.judge(report(row(), bad, outcome="reproduced"))
    assert "--scenario hangs" in verdict.remedy
    assert verdict.evidence["hangs 2+1+0"] == "7 states, 3 ends, 2 fail, all there are"
    (shown,) = verdict.schedules
    assert (shown.title, shown.lanes, shown.planted) == ("hangs 2+1+0", {"main": ""}, False)
    assert (shown.steps, shown.preemptions, shown.failure) == ((("main", "waits"),), 1, "P2: x")


def test_a_planted_bug_passes_when_it_is_found():
    found = row(bug="notify-one", failing=1, failure="P2: x", outcome="reproduced")
    missed = row(bug="arrive-first")
    short = row(complete=False, outcome="cannot tell", unclear="killed")
    outcomes = [case.outcome for case in gate_check.cases(report(found, missed, short))]
    assert outcomes == ["absent", "cannot tell", "cannot tell"]


def test_the_real_search_of_one_scenario_and_one_bug(tmp_path):
    """The program itself, without torch to import."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "diagnostics", "gate-check", "--json", "--scenario", "hangs"]
    junit = tmp_path / "report.xml"
    done = subprocess.run(
        [*command, "--quick", "--bug", "missing-notify", "--junit", junit],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["code"] == "gate-holds"
    assert verdict["evidence"]["hangs 2+1+0"].endswith("0 fail, all there are")
    assert "found: P2: nobody wakes" in verdict["evidence"]["bug missing-notify"]
    assert "=> P2: nobody wakes" in done.stderr
    (schedule,) = verdict["schedules"]
    assert schedule["planted"] and schedule["title"] == "arriving at the gate wakes nobody"
    assert schedule["failure"].startswith("P2: nobody wakes")
    assert ["drafter-0", "arrives at the gate"] in schedule["steps"]
    assert list(schedule["lanes"]) == ["main", "drafter-0", "drafter-1"]
    assert 'failures="0" errors="0"' in junit.read_text()
