"""The load's own oracles, and the parked schedules with a function of the user's."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the loads need torch", allow_module_level=True)

REPRO = Path(__file__).parents[2] / "repro"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
IS_MEASURED = importlib.metadata.version("torch").startswith("2.13.")
BROKEN = {"DF001", "DF004", "DF006"}
ORACLES = """
import copy, json, sys
sys.path.insert(0, sys.argv[1])
import harness, loads, torch
from cures import CURES
from stage import Stage

cure = CURES["none"](Stage())
step = loads.target(cure, "cpu", seed=0)()
said = [step()]
state = torch.get_rng_state()
said.append(step())
torch.set_rng_state(state)  # as a compile in another thread does
said.append(step())
block = loads.Block(loads._dense_attention)
x_BSD = torch.randn(1, 8, 128)
out_BSD = block(x_BSD)
said += [loads._differs(out_BSD, block, x_BSD), loads._differs(out_BSD + 1, block, x_BSD)]
print(json.dumps(said))
"""
STEPS = """
import torch

def compiled():
    forward = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
    return lambda: forward(torch.ones(2, 4)).sum().backward()

not_a_function = 1
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(STEPS)

    def cells(target, *options):
        command = [sys.executable, str(REPRO / "cells.py"), "--target", target, *options]
        run = {"env": ENV, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(command, **run)

    return cells


def test_the_oracles_see_what_they_are_there_for():
    command = [sys.executable, "-c", ORACLES, str(REPRO)]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    *draws, same, other = json.loads(ended.stdout)
    assert draws == ["", "", "a random number was drawn twice (DF006)"]
    assert (same, other) == ("", "compiled and eager output differ by 1.0e+00")


def test_a_step_of_the_users_own_is_broken_and_cured(mine):
    ended = mine("mine:compiled", "--cure", "none", "--cure", "shipped")
    plan, *rows = map(json.loads, ended.stdout.splitlines())
    assert len(rows) == len(plan["cells"]) == 8, ended.stderr
    outcome = {(row["code"], row["cure"]): row["outcome"] for row in rows}
    # Its traces are make_fx's, which run modules and do not note them: nothing can be said.
    assert outcome.pop(("DF003", "none")) == outcome.pop(("DF003", "shipped")) == "cannot tell"
    if IS_MEASURED:
        assert {outcome[code, "none"] for code in BROKEN} == {"reproduced"}
    assert {outcome[code, "shipped"] for code in BROKEN} == {"absent"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine", "type package.module:function"),
        ("mine:gone", "has no attribute 'gone'"),
        ("mine:not_a_function", "it is a int, not a function"),
        ("gone:step", "No module named 'gone'"),
    ],
)
def test_a_target_that_is_none_is_refused_before_anything_runs(mine, target, message):
    ended = mine(target)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ended.stdout == ""
