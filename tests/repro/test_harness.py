"""What a run may not claim. In a child: the harness changes its process's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPRO = Path(__file__).parents[2] / "repro"


BODIES = {
    "a window": ["run.opened('compile')", "return harness.judged(False, 'fine')"],
    "no window": ["return harness.judged(False, 'fine')"],
    "a point missed": [
        "run.stage.deadline_s = 0.01",
        "run.stage.wait('B inside')",
    ],
    "a standstill": [
        "run.start('A', lambda: run.stage.wait('B inside'))",
        "run.start('B', lambda: run.stage.wait('A inside'))",
        "run.finish()",
    ],
    "a deadlock": [
        "def hold():",
        "    with run.stage.hold():",
        "        run.stage.reach('A holds')",
        "        run.stage.wait('B inside')",
        "def want():",
        "    run.stage.wait('A holds')",
        "    with run.stage.hold():",
        "        run.stage.reach('B inside')",
        "run.start('A', hold)",
        "run.start('B', want)",
        "run.finish()",
    ],
    "a stuck thread": [
        "run.stage.deadline_s = 0.01",
        "run.start('A', harness.threading.Event().wait)",
        "run.finish()",
    ],
    "the lock": [
        "inside, most = [], []",
        "def work():",
        "    for _ in range(200):",
        "        with run.stage.hold(), run.stage.hold():",
        "            inside.append(1); most.append(len(inside)); inside.pop()",
        "for name in 'ABC': run.start(name, work)",
        "run.finish()",
        "run.opened('compile')",
        "return harness.judged(max(most) > 1, f'{len(most)} turns')",
    ],
}


@pytest.fixture(scope="module")
def judged():
    """The outcome and reason of each body, by the harness; one child runs them all."""
    lines = ["import json, harness", "from cures import Cure", "found = {}"]
    for name, body in BODIES.items():
        lines += ["def reproduce(run):", *(f"    {line}" for line in body)]
        lines.append(f"found[{name!r}] = harness.examine(reproduce, harness.Run(Cure))")
    lines.append("print(json.dumps({n: [f.outcome, f.reason] for n, f in found.items()}))")
    lines.append("harness.sys.stdout.flush(); harness.os._exit(0)")
    env = {**os.environ, "PYTHONPATH": str(REPRO)}
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_absent_needs_an_open_window(judged):
    assert judged["a window"] == ["absent", "fine"]
    assert judged["no window"] == ["cannot tell", "no trace window was opened"]


def test_a_point_that_is_not_reached_in_time_proves_nothing(judged):
    assert judged["a point missed"] == ["cannot tell", "MainThread waited 0.01 s for: B inside"]


def test_a_point_that_nobody_can_reach_is_noticed_at_once(judged):
    reason = "nobody can go on: A waits for B inside; B waits for A inside"
    assert judged["a standstill"] == ["cannot tell", reason]


def test_a_deadlock_at_a_lock_hangs(judged):
    reason = "nobody can go on: A waits for B inside; B waits for the step lock"
    assert judged["a deadlock"] == ["hung", reason]


def test_a_stuck_thread_proves_nothing(judged):
    outcome, reason = judged["a stuck thread"]
    assert outcome == "cannot tell"
    assert "A did not end" in reason


def test_the_lock_keeps_others_out_and_lets_its_owner_in_again(judged):
    assert judged["the lock"] == ["absent", "600 turns"]


def test_the_readme_is_the_docstrings():
    command = [sys.executable, str(REPRO / "pages.py")]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (REPRO / "README.md").read_text(encoding="utf-8") == page, (
        "write it anew: python repro/pages.py > repro/README.md"
    )
