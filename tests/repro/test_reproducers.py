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

import filelock
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the reproducers need torch", allow_module_level=True)

REPRO = Path(__file__).parents[2] / "repro"
EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125, "hung": 125}
KEYS = {
    *("code", "mode", "cure", "when", "device"),
    *("outcome", "manner", "reason", "torch", "evidence", "seconds"),
}
IS_MEASURED = importlib.metadata.version("torch").startswith("2.13.")

# Every reproducer of the CPU, and the cures that hold while something is traced later on.
HOLDING = {
    "df001_fx_flag": {"thread-local-flag", "patcher-isolation", "lock-every-step"},
    "df002_sticky_flag": {"thread-local-flag", "patcher-isolation", "lock-every-step"},
    "df003_eager_module": {"patcher-isolation", "lock-every-step"},
    "df004_overlapping_traces": {"patcher-isolation", "lock-every-step"},
    "df005_patched_module_call": {"patcher-isolation", "lock-every-step"},
    "df006_rng_rewind": {"private-generator", "lock-every-step"},
    "df007_global_settings": {"settings-first", "lock-every-step"},
    "df008_is_compiling": {"own-is-compiling", "lock-every-step"},
    "df009_recompile_limit": {"own-code"},
    "df010_backward_compiled_twice": {"own-code", "non-lazy-backward", "lock-every-step"},
    "df011_config_in_threads": {"copy-context"},
}
# Only where torch is built for CUDA and there is no GPU; the table is measured on a CPU build.
GUARD = "df014_guard_of_an_ended_thread"
# Only where Dynamo's settings belong to the process: before 2.12.
SETTINGS = "df015_settings_of_a_call"
CUDA_ONLY = {"df012_autograd_thread_deadlock", "df013_cudagraph_threads"}
CONTROL = "df000_single_thread"
BREAKING = {"module-class-swap", "sys-modules-wrapper", "config-flag"}
# Of the cures that are meant for start-up: where they hold there.
HOLDING_AT_START_UP = {
    "gate-only": {"DF001", "DF003", "DF006", "DF007", "DF008"},
    "main-thread-first": {*(f"DF00{mode}" for mode in range(1, 9)), "DF010"},
}
# The cures that touch more than one failure; each of the others is run where it holds.
TABLE_CURES = [
    *("none", "shipped", "thread-local-flag", "patcher-isolation", "lock-every-step"),
    *("config-flag", *HOLDING_AT_START_UP),
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
    """Whether the failure does not happen under that cure, at that moment."""
    if when == "in-compile":  # masked without a cure, on the torch that was measured
        return code == "DF001" or cure == "shipped"
    if code == "DF000":
        return cure not in BREAKING
    if code.lower() in (GUARD[:5], SETTINGS[:5]):
        return True
    if when == "start-up" and cure in HOLDING_AT_START_UP:
        return code in HOLDING_AT_START_UP[cure]
    if cure == "shipped":
        return True
    return any(cure in cures for name, cures in HOLDING.items() if name[:5].upper() == code)


@pytest.fixture(scope="module")
def table(tmp_path_factory, worker_id):
    """Every failure by every such cure: the plan and the rows. Run once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    answer = (base if worker_id == "master" else base.parent) / "fxrace-cells.jsonl"
    with filelock.FileLock(f"{answer}.lock"):
        if not answer.exists():
            answer.write_text(run_table())
    plan, *rows = map(json.loads, answer.read_text().splitlines())
    assert len(rows) == len(plan["cells"])
    return plan, rows


def run_table():
    codes = [path.name[:5].upper() for path in sorted(REPRO.glob("df*.py"))]
    return cells(codes, TABLE_CURES)


def cells(codes, cures):
    options = [word for code in codes for word in ("--code", code)]
    options += [word for cure in cures for word in ("--cure", cure)]
    command = [sys.executable, str(REPRO / "cells.py"), *options]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_table_is_as_measured(table):
    _, rows = table
    assert {row["outcome"] for row in rows} <= set(EXIT_CODES), rows
    if not IS_MEASURED:
        return
    wrong = [
        row
        for row in rows
        if (row["outcome"] == "absent") != should_hold(row["code"], row["cure"], row["when"])
        or row["outcome"] not in ("absent", "reproduced")
    ]
    assert not wrong, wrong


def test_how_a_failure_shows_itself(table):
    """Masked by the leak of is_compiling, or without an error: neither is taken for cured."""
    manner = {(row["code"], row["cure"], row["when"]): row["manner"] for row in table[1]}
    if IS_MEASURED:
        assert manner["DF001", "none", "in-compile"] == "masked"
        assert manner["DF001", "shipped", "in-compile"] == ""
        assert manner["DF001", "config-flag", "later"] == "silent"


def test_the_cost_of_a_cure_is_measured():
    _, start_up, later = map(json.loads, cells(["COST"], ["gate-only"]).splitlines())
    assert {start_up["when"], later["when"]} == {"start-up", "later"}
    for row in (start_up, later):
        if IS_MEASURED:
            assert row["outcome"] == "measured"
        if row["outcome"] == "measured":
            assert float(row["reason"].removesuffix(" s")) >= 0


def test_is_compiling_alone_unmasks_the_flag():
    """Why it is made thread-local together with the flag only."""
    rows = map(json.loads, cells(["DF001"], ["none", "own-is-compiling"]).splitlines()[1:])
    outcome = {(row["cure"], row["when"]): row["outcome"] for row in rows}
    if IS_MEASURED:
        assert outcome["none", "in-compile"] == "absent"
        assert outcome["own-is-compiling", "in-compile"] == "reproduced"


def test_what_needs_cuda_is_left_out_by_name(table):
    assert table[0]["left_out"] == ["DF012", "DF013"]


@pytest.mark.parametrize("cure", ["none", "lock-every-step", "main-thread-first", "shipped"])
def test_the_guard_of_a_thread_that_has_ended(cure):
    import torch

    line = child(GUARD, "--cure", cure)
    without_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
    if cure in ("main-thread-first", "shipped") or not without_gpu:
        assert line["outcome"] == "absent", line
    elif torch.__version__.startswith("2.11."):
        assert line["outcome"] == "reproduced", line


@pytest.mark.parametrize("cure", ["none", "gate-only", "lock-every-step", "shipped"])
def test_the_settings_of_another_threads_call(cure):
    line = child(SETTINGS, "--cure", cure)
    if IS_MEASURED or cure in ("lock-every-step", "shipped"):
        assert line["outcome"] == "absent", line
    elif line["torch"].startswith("2.11."):
        assert line["outcome"] == "reproduced", line
        assert line["evidence"]["beside"] > line["evidence"]["alone"]


def test_every_reproducer_is_tested():
    tested = {CONTROL, *HOLDING, GUARD, SETTINGS, *CUDA_ONLY}
    assert {path.stem for path in REPRO.glob("df*.py")} == tested


def test_without_cuda_it_cannot_tell():
    for line in children([(name,) for name in sorted(CUDA_ONLY)]):
        assert line["outcome"] == "cannot tell"
        assert "needs CUDA" in line["reason"]


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


def test_a_usage_error_is_exit_code_2():
    command = [sys.executable, str(REPRO / "df003_eager_module.py"), "--cure", "prayer"]
    assert subprocess.run(command, env=ENV, capture_output=True, timeout=120).returncode == 2
