"""Each reproducer as the program it is, and the table failure by cure.

What is expected was measured on torch 2.13. On another torch the outcome is the behaviour's to
decide, and only its form is checked.
"""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the reproducers need torch", allow_module_level=True)

REPRO = Path(__file__).parents[2] / "repro"
EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot-tell": 125}
KEYS = {
    *("code", "mode", "cure", "when", "window"),
    *("outcome", "reason", "torch", "evidence", "seconds"),
}
IS_MEASURED = importlib.metadata.version("torch").startswith("2.13.")

# Every reproducer, and the cures of the table that hold while something is traced later on.
HOLDING = {
    "df001_fx_flag": {"thread-local-flag", "patcher-isolation", "lock-every-step"},
    "df002_sticky_flag": {"thread-local-flag", "patcher-isolation", "lock-every-step"},
    "df003_eager_module": {"patcher-isolation", "lock-every-step"},
    "df004_overlapping_traces": {"patcher-isolation", "lock-every-step"},
    "df005_patched_module_call": {"patcher-isolation", "lock-every-step"},
    "df006_rng_rewind": {"private-generator", "lock-every-step"},
    "df007_global_settings": {"lock-every-step"},
    "df008_is_compiling": {"thread-local-is-compiling", "lock-every-step"},
    "df009_recompile_limit": {"own-code"},
    "df011_config_in_threads": {"copy-context"},
}
# Of the cures that are meant for start-up: where they hold there.
HOLDING_AT_START_UP = {
    "gate-only": {"DF001", "DF003", "DF006", "DF007", "DF008"},
    "main-thread-first": {*(f"DF00{mode}" for mode in range(1, 9))},
}
# The cures that touch more than one failure; each of the others is run where it holds.
TABLE_CURES = [
    *("thread-local-flag", "patcher-isolation", "lock-every-step", "config-flag"),
    *HOLDING_AT_START_UP,
]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def child(name, *options):
    """The last line of a reproducer that was started on its own."""
    command = [sys.executable, str(REPRO / f"{name}.py"), *options]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
    return read(name, ended.returncode, ended.stdout, ended.stderr)


def children(runs):
    """The last lines of reproducers forked from one process, so that torch is imported once."""
    command = [sys.executable, str(Path(__file__).with_name("forked.py"))]
    command += [shlex.join([f"{REPRO / name}.py", *options]) for name, *options in runs]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    programs = [json.loads(line) for line in ended.stdout.splitlines()]
    return [
        read(name, program["status"], program["said"], ended.stderr)
        for (name, *_), program in zip(runs, programs, strict=True)
    ]


def read(name, status, said, errors):
    """The JSON line, checked against the exit status."""
    assert status in EXIT_CODES.values(), errors
    line = json.loads(said.splitlines()[-1])
    assert set(line) == KEYS
    assert status == EXIT_CODES[line["outcome"]], line
    assert line["code"].lower() == name[:5]
    return line


def expect(line, outcome):
    if IS_MEASURED:
        assert line["outcome"] == outcome, line
        assert line["evidence"]["windows"], line


def should_hold(code, cure, when):
    if when == "start-up" and cure in HOLDING_AT_START_UP:
        return code in HOLDING_AT_START_UP[cure]
    return any(cure in cures for name, cures in HOLDING.items() if name[:5].upper() == code)


def test_the_table_is_as_measured():
    """Every failure by every such cure, later on and at start-up."""
    options = [word for cure in TABLE_CURES for word in ("--cure", cure)]
    command = [sys.executable, str(REPRO / "cells.py"), *options]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    plan, *rows = map(json.loads, ended.stdout.splitlines())
    assert len(rows) == len(plan["cells"]), ended.stderr
    assert {row["outcome"] for row in rows} <= set(EXIT_CODES), rows
    if not IS_MEASURED:
        return
    wrong = [
        row
        for row in rows
        if (row["outcome"] == "absent") != should_hold(row["code"], row["cure"], row["when"])
        or row["outcome"] == "cannot-tell"
    ]
    assert not wrong, wrong


def test_every_reproducer_is_tested():
    assert {path.stem for path in REPRO.glob("df*.py")} == set(HOLDING)


@pytest.mark.parametrize(
    "name", ["df001_fx_flag", "df004_overlapping_traces", "df009_recompile_limit"]
)
def test_broken_alone(name):
    """One for each schedule: beside a window, overlapping windows, one thread after another."""
    expect(child(name), "reproduced")


def test_broken_and_fixed_are_one_option_apart():
    runs = [
        (name, cure, outcome)
        for name, holding in HOLDING.items()
        for cure, outcome in (
            ("none", "reproduced"),
            ("module-class-swap", "reproduced"),  # the control: a cure that does nothing
            (min(holding - {"lock-every-step"}, default="lock-every-step"), "absent"),
        )
    ]
    lines = children([(name, "--cure", cure) for name, cure, _ in runs])
    for line, (_, cure, outcome) in zip(lines, runs, strict=True):
        assert line["cure"] == cure
        expect(line, outcome)


def test_a_trace_within_a_compile_is_masked_by_the_leak_of_is_compiling():
    expect(child("df001_fx_flag", "--window", "compile"), "absent")


def test_a_usage_error_is_exit_code_2():
    command = [sys.executable, str(REPRO / "df003_eager_module.py"), "--cure", "prayer"]
    assert subprocess.run(command, env=ENV, capture_output=True, timeout=120).returncode == 2
