"""The load: how its child is read, and the load itself, which must be able to find something."""

import importlib.util
import json

import pytest

from diagnostics.probes.fxrace import stress, table, target
from diagnostics.probes.fxrace.stress import Load
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

PLAN = {"torch": "2.13", "device": "cpu", "cure": "none", "target": None}
PLAN |= {"seconds": 5, "drafters": 3, "targets": 1}
END = {"reason": "why", "trace_windows": 8, "threads_tracing_at_once": 2, "left_behind": []}
FLAG_RACE = """Traceback (most recent call last):
  File "/opt/torch/_dynamo/eval_frame.py", line 1120, in compile_wrapper
    raise RuntimeError(
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. \
This is not supported at the moment.
"""


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Run a child that says these lines; returns the verdict and what was shown."""

    def run(*lines, then=""):
        said = [f"print({json.dumps(line)!r}, flush=True)" for line in lines]
        (tmp_path / "stress.py").write_text("\n".join([*said, then]))
        monkeypatch.setattr(stress, "reproducer_dir", lambda: tmp_path)
        shown = []
        return Load([], shown.append).run(), shown

    return run


def ending(outcome, **threads):
    accounts = {name: {"steps": 9, "failures": failures} for name, failures in threads.items()}
    return {**END, "outcome": outcome, "threads": accounts}


def test_what_failed_is_classified(load):
    failure = {"thread": "drafter-1", "step": 3, "failure": "RuntimeError", "traceback": FLAG_RACE}
    end = ending("reproduced", **{"drafter-1": {"RuntimeError": 2}})
    verdict, shown = load(
        PLAN, {"after_s": 5, "steps": {"drafter-1": 3}}, failure, end, then="exit(10)"
    )
    assert verdict.status is Status.PROBLEM
    assert "DF001" in verdict.remedy
    assert verdict.evidence == {"drafter-1": "9 steps; 2 x RuntimeError"}
    assert [line.strip() for line in shown[1:]] == [
        "5 s of 5  steps: drafter-1 3",
        "drafter-1, step 3: RuntimeError",
    ]


def test_a_failure_that_the_load_named_itself(load):
    drawn = "a random number was drawn twice (DF006)"
    failure = {"thread": "target-0", "step": 3, "failure": drawn, "traceback": ""}
    verdict, _ = load(PLAN, failure, ending("reproduced"), then="exit(10)")
    assert verdict.remedy == "seen here: DF006; type: dflash-diag fxrace --mode DF006"


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [("absent", 0, Status.OK), ("cannot tell", 125, Status.UNKNOWN)],
)
def test_nothing_seen_is_not_nothing_tried(load, outcome, code, status):
    verdict, _ = load(PLAN, ending(outcome), then=f"exit({code})")
    assert verdict.status is status
    assert verdict.summary == "torch 2.13, cure none: why; 8 FX traces, at most 2 at once"


def test_a_hang_is_a_finding_with_its_stacks(load):
    stuck = "import sys; sys.stderr.write('Thread 0x1 in wait'); exit(125)"
    verdict, _ = load(PLAN, ending("hung"), then=stuck)
    assert verdict.status is Status.PROBLEM
    assert verdict.evidence["stacks"] == "Thread 0x1 in wait"


def test_a_child_that_hangs_as_a_whole_is_dumped_and_killed(load, monkeypatch):
    monkeypatch.setattr(stress, "QUIET_S", 3.0)
    verdict, _ = load(PLAN, then="import signal; signal.pause()")
    assert verdict.status is Status.PROBLEM
    assert "hangs as a whole" in verdict.summary
    assert verdict.evidence["stacks"]  # of py-spy, or why it could not look


def test_a_crash_is_a_finding(load):
    verdict, _ = load(PLAN, then="import os; os.abort()")
    assert verdict.status is Status.PROBLEM
    assert "SIGABRT" in verdict.summary


def test_a_load_that_did_not_start_proves_nothing(load):
    verdict, _ = load(then="raise SystemExit('no torch')")
    assert verdict.status is Status.UNKNOWN
    assert "no torch" in verdict.summary


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the load needs torch")
def test_the_real_load_under_the_shipped_cure():
    shown = []
    verdict = Load(["--seconds", "4", "--drafters", "2", "--cure", "shipped"], shown.append).run()
    assert verdict.status is Status.OK, verdict
    assert set(verdict.evidence) == {"drafter-0", "drafter-1", "target-0"}


def test_a_step_is_as_bad_as_its_worst_part(monkeypatch):
    cells = [
        table.Cell("DF001", "none", "later", Outcome.REPRODUCED, "failed"),
        table.Cell("DF001", "shipped", "later", Outcome.ABSENT, "fine"),
        table.Cell("DF001", "gate-only", "later", Outcome.REPRODUCED, "failed"),
        table.Cell("DF003", "none", "later", Outcome.CANNOT_TELL, "no trace"),
    ]

    def measured(arguments, _show):
        assert arguments == ["--target", "mine:step"]
        return table.Report("2.13", tuple(cells))

    def under_load(self):
        bare = "none" in self._arguments
        return Verdict(Status.PROBLEM if bare else Status.OK, "c", f"{self._arguments[-1]}!")

    monkeypatch.setattr(table, "measure", measured)
    monkeypatch.setattr(Load, "run", under_load)
    verdict = target.probe("mine:step", [], [], lambda _line: None)
    assert verdict.status is Status.PROBLEM
    assert verdict.summary == "mine:step, parked: it can meet DF001; under load: none!"
    assert verdict.remedy == (
        "against all of these suffices, parked: shipped; under load with shipped: shipped!"
    )
