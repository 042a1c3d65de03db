"""What a run may not claim. In a child: the harness changes its process's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPRO = Path(__file__).parents[2] / "repro"


def judged(reproduce):
    """The outcome and reason of `reproduce`, source text of a function body, by the harness."""
    program = "\n".join(
        [
            "import json, harness",
            "from cures import Cure",
            "def reproduce(run):",
            *(f"    {line}" for line in reproduce),
            "found = harness.examine(reproduce, harness.Run(Cure))",
            "print(json.dumps([found.outcome, found.reason]))",
        ]
    )
    env = {**os.environ, "PYTHONPATH": str(REPRO)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_absent_needs_an_open_window():
    assert judged(["run.opened('compile')", "return harness.judged(False, 'fine')"])[0] == "absent"
    outcome, reason = judged(["return harness.judged(False, 'fine')"])
    assert (outcome, reason) == ("cannot-tell", "no trace window was opened")


def test_a_point_that_is_not_reached_in_time_proves_nothing():
    late = ["run.stage.deadline_s = 0.01", "run.opened('compile')"]
    in_thread = [*late, "run.start('A', lambda: run.stage.wait('B inside'))", "run.finish()"]
    for body in ([*late, "run.stage.wait('B inside')"], in_thread):
        outcome, reason = judged(body)
        assert outcome == "cannot-tell"
        assert "0.01 s" in reason


def test_a_stuck_thread_proves_nothing():
    stuck = [
        "run.stage.deadline_s = 0.01",
        "run.start('A', harness.threading.Event().wait)",
        "run.finish()",
    ]
    outcome, reason = judged(stuck)
    assert outcome == "cannot-tell"
    assert "A did not end" in reason


def test_the_readme_is_the_docstrings():
    command = [sys.executable, str(REPRO / "pages.py")]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (REPRO / "README.md").read_text(encoding="utf-8") == page, (
        "write it anew: python repro/pages.py > repro/README.md"
    )
