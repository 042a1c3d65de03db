"""The failures that need CUDA, each broken and cured one option apart; measured on torch 2.11."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the reproducers need torch", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
IS_MEASURED = importlib.metadata.version("torch").startswith("2.11.")

pytestmark = pytest.mark.gpu


def outcome(name, cure):
    command = [sys.executable, str(ROOT / "repro" / f"{name}.py"), "--device", "cuda"]
    ended = subprocess.run(
        [*command, "--cure", cure], env=ENV, capture_output=True, text=True, timeout=150
    )
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["outcome"] in ("reproduced", "absent"), line
    assert line["evidence"]["windows"], line
    return line


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("df001_fx_flag", "shipped"),
        ("df003_eager_module", "shipped"),
        ("df006_rng_rewind", "private-generator"),
        ("df012_autograd_thread_deadlock", "own-thread-backward"),
        ("df012_autograd_thread_deadlock", "non-lazy-backward"),
        ("df012_autograd_thread_deadlock", "lock-every-step"),
        ("df013_cudagraph_threads", "own-capture"),
        ("df015_settings_of_a_call", "shipped"),
    ],
)
def test_broken_and_cured(name, cure):
    broken = outcome(name, "none")
    if IS_MEASURED:
        assert broken["outcome"] == "reproduced"
    assert outcome(name, cure)["outcome"] == "absent"


def test_the_isolation_alone_does_not_cure_the_deadlock():
    line = outcome("df012_autograd_thread_deadlock", "patcher-isolation")
    if IS_MEASURED:
        assert line["outcome"] == "reproduced"
        frames = [frame.split()[0] for stack in line["evidence"]["stacks"] for frame in stack]
        assert "_engine_run_backward" in frames


def test_the_program_of_the_report_deadlocks(tmp_path):
    page = (ROOT / "docs" / "fxrace.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# deadlock\.py.*?)```", page, re.DOTALL)
    assert len(list(filter(None, program.splitlines()))) <= 40
    (tmp_path / "deadlock.py").write_text(program)
    command = [sys.executable, str(tmp_path / "deadlock.py")]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=150)
    if IS_MEASURED:
        assert "deadlock" in ended.stdout, ended.stderr
