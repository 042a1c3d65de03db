"""Each launch failure as the program it is: broken, mended one flag further, and alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diagnostics.launch.rules import RULES
from diagnostics.reproducers import reproducers

REPRO = Path(__file__).parents[2] / "repro"
PROGRAMS = sorted(REPRO.glob("dl[0-9]*.py"))
CONTROL = "DL000"
KEYS = {"code", "mode", "fixed", "outcome", "reason", "evidence", "seconds"}
EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125}


def run(path, *options, **more):
    ended = subprocess.run(
        [sys.executable, str(path), *options], capture_output=True, text=True, timeout=120, **more
    )
    assert ended.returncode in EXIT_CODES.values(), ended.stderr
    line = json.loads(ended.stdout.splitlines()[-1])
    assert set(line) == KEYS
    assert ended.returncode == EXIT_CODES[line["outcome"]]
    return line


def test_there_is_one_for_each_failure_that_the_project_is_about():
    assert [path.stem for path in PROGRAMS] == [
        "dl000_exec_keeps_log",
        "dl001_missing_directory",
        "dl007_tee_hides_status",
        "dl011_lost_buffer",
        "dl017_nohup_too_late",
        "dl027_wrong_side",
    ]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_broken_and_fixed_are_one_flag_apart(path, tmp_path):
    """In a directory of its own, with an unbuffered test run around it, and nothing left there."""
    around = {"cwd": tmp_path, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
    broken, fixed = run(path, **around), run(path, "--fixed", **around)
    assert broken["code"] == fixed["code"] == path.stem[:5].upper()
    if broken["outcome"] == "cannot tell":
        pytest.skip(broken["reason"])
    assert broken["outcome"] == ("absent" if broken["code"] == CONTROL else "reproduced"), broken
    assert fixed["outcome"] == "absent", fixed
    assert list(tmp_path.iterdir()) == []


def test_exec_and_no_exec_keep_the_same_lines():
    """What is missing is Python's buffer: the control's evidence says so in numbers."""
    with_exec, without = (run(PROGRAMS[0], *options) for options in ([], ["--fixed"]))
    assert with_exec["evidence"] == without["evidence"]
    assert 0 < with_exec["evidence"]["lines_kept"] < with_exec["evidence"]["lines_written"]


@pytest.mark.parametrize("path", PROGRAMS[1:], ids=lambda path: path.stem)
def test_a_code_is_that_of_a_finding(path):
    assert path.stem[:5].upper() in RULES


def test_fxrace_does_not_take_them_for_compile_races():
    assert not any(code.startswith("DL") for code in reproducers())


def test_where_a_tool_is_missing_it_cannot_tell(tmp_path):
    env = {**os.environ, "PATH": str(tmp_path)}
    for path in PROGRAMS:
        assert run(path, env=env)["outcome"] == "cannot tell"
