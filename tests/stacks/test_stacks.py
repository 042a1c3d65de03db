"""Stuck threads in real processes: what they are said to be doing, and that they live on."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.stacks import pyspy
from diagnostics.stacks.states import State, classify
from diagnostics.stacks.verdict import judge

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SETTLES_S = 100.0
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the program needs torch"
)


@pytest.fixture
def stuck():
    """Start a program, wait until it says that it is stuck, and end it afterwards."""
    children = []

    def start(path, *arguments, says="stuck"):
        child = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        children.append(child)
        assert says in iter(child.stdout.readline, ""), "the program ended without a word"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(30)


def settled(pid, wanted, native=False):
    """Findings by thread, once all of `wanted` are seen: the last words come before the wait."""
    deadline_s = time.monotonic() + SETTLES_S
    while True:
        try:
            findings = {str(f.thread): f for f in map(classify, pyspy.dump(pid, native=native))}
        except pyspy.Refused:  # now and then, of a process that is just loading libraries
            assert time.monotonic() < deadline_s
            continue
        seen = {name: finding.state for name, finding in findings.items()}
        if wanted <= seen.items() or time.monotonic() > deadline_s:
            return findings


@needs_torch
def test_a_compile_and_who_waits_for_its_lock(stuck):
    child = stuck(PROGRAMS / "compile_lock.py", says="stuck\n")
    wanted = {"drafter-0": State.COMPILES, "drafter-1": State.AWAITS_COMPILE_LOCK}
    findings = settled(child.pid, wanted.items())
    assert {name: findings[name].state for name in wanted} == wanted
    assert findings["drafter-0"].detail == "dynamo"
    verdict = judge(list(findings.values()))
    assert verdict.summary == (
        "drafter-0 compiles (dynamo); drafter-1 wait(s) for torch's compile lock, which it holds "
        "(suspicion)"
    )
    assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED


def test_there_is_no_such_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    answer = CliRunner().invoke(main, ["stacks", str(child.pid)])
    assert answer.exit_code == 3
    assert f"there is no process {child.pid}" in answer.output


def test_py_spy_that_is_not_there_is_an_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_PY_SPY", str(tmp_path / "py-spy"))
    answer = CliRunner().invoke(main, ["stacks", str(os.getpid()), "--json"])
    assert answer.exit_code == 3
    assert "py-spy is not installed" in json.loads(answer.output)["summary"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("synchronize", State.AWAITS_DEVICE),
        ("event", State.AWAITS_EVENT),
        ("item", State.AWAITS_STREAM),
    ],
)
def test_a_thread_that_waits_for_a_kernel(stuck, how, state):
    child = stuck(PROGRAMS / "cuda_wait.py", how, says="stuck\n")
    native = how == "item"  # only C code waits there
    findings = settled(child.pid, {("drafter-1", state)}, native=native)
    assert findings["drafter-1"].state is state, findings["drafter-1"].thread.frames
    assert judge(list(findings.values())).code == "waiting-for-the-device"


@pytest.mark.gpu
@pytest.mark.parametrize("native", [False, True])
def test_the_deadlock_of_the_compile_lock_and_the_autograd_thread(stuck, tmp_path, native):
    """The program of docs/fxrace.md: DF012 with torch's own lock."""
    page = (ROOT / "docs" / "fxrace.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# deadlock\.py.*?)```", page, re.DOTALL)
    (tmp_path / "deadlock.py").write_text("print('starts', flush=True)\n" + program)
    child = stuck(tmp_path / "deadlock.py", says="starts\n")
    wanted = {(A, State.AWAITS_AUTOGRAD), (B, State.COMPILE_AWAITS_AUTOGRAD)}
    is_the_deadlock(settled(child.pid, wanted, native=native).values(), native)


@pytest.mark.parametrize("name", ["deadlock", "deadlock-native"])
def test_a_dump_of_that_deadlock(name):
    """Taken on an H200, torch 2.11, Python 3.12, with py-spy 0.4.3."""
    path = Path(__file__).with_name("dumps") / f"{name}.json"
    threads = map(pyspy.thread, json.loads(path.read_text(encoding="utf-8")))
    is_the_deadlock(list(map(classify, threads)), native="native" in name)


A, B = "Thread-1 (a)", "Thread-2 (b)"


def is_the_deadlock(findings, native):
    verdict = judge(list(findings))
    assert verdict.code == "DF012", list(map(str, findings))
    assert verdict.summary.startswith(f"deadlock: {B} holds torch's compile lock")
    assert f"compiles the backward of {A} and waits for the lock" in verdict.summary
    if native:
        frames = {frame.function for f in findings for frame in f.thread.frames}
        assert {"PyThread_acquire_lock_timed", "pop"} <= frames
