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

from dflash.heartbeat import Event, Loop, Snapshot
from diagnostics.cli import main
from diagnostics.stacks import pyspy, run, target, tree
from diagnostics.stacks.states import Finding, State, classify
from diagnostics.stacks.threads import Frame, Thread
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

    def start(path, *arguments, says="stuck\n"):
        child = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdin=subprocess.PIPE,
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


def settled(pid, enough, native=False):
    """Findings by thread, once they are `enough`: the program's last words come before the wait."""
    deadline_s = time.monotonic() + SETTLES_S
    while True:
        try:
            findings = {str(f.thread): f for f in map(classify, pyspy.sample(pid, native=native))}
        except pyspy.Refused:  # now and then, of a process that is just loading libraries
            assert time.monotonic() < deadline_s
            continue
        if enough(findings) or time.monotonic() > deadline_s:
            return findings


def has(wanted):
    """Whether these threads are in these states."""
    return lambda findings: all(n in findings and findings[n].state is s for n, s in wanted.items())


@needs_torch
def test_a_compile_and_who_waits_for_its_lock(stuck):
    child = stuck(PROGRAMS / "compile_lock.py")
    wanted = {"drafter-0": State.COMPILES, "drafter-1": State.AWAITS_COMPILE_LOCK}
    findings = settled(child.pid, has(wanted))
    assert {name: findings[name].state for name in wanted} == wanted
    assert findings["drafter-0"].detail == "dynamo"
    verdict = judge(list(findings.values()))
    assert verdict.summary == (
        "drafter-0 compiles (dynamo); drafter-1 wait(s) for torch's compile lock, which it holds "
        "(suspicion); a compile is no hang"
    )
    assert psutil.Process(child.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("native", [False, True])
def test_a_thread_that_waits_has_not_moved_between_the_looks(stuck, tmp_path, native):
    program = tmp_path / "waits.py"
    program.write_text(
        "import threading\n"
        "event = threading.Event()\n"
        "thread = threading.Thread(target=event.wait, name='waiter')\n"
        "thread.start()\n"
        "print('stuck', flush=True)\n"
        "thread.join()\n"
    )
    wanted = {"waiter": State.EVENT, "MainThread": State.JOIN}
    findings = settled(stuck(program).pid, has(wanted), native)
    assert {name: findings[name].state for name in wanted} == wanted
    assert findings["MainThread"].object_id == findings["waiter"].thread.object_id is not None


def test_there_is_no_such_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    answer = CliRunner().invoke(main, ["stacks", str(child.pid)])
    assert answer.exit_code == 3
    assert f"there is no process {child.pid}" in answer.output


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """A function that puts a py-spy in place that fails so often, with these words; and a count."""
    looks = tmp_path / "looks"
    looks.touch()

    def put(times, words):
        path = tmp_path / "py-spy"
        path.write_text(
            f"#!/bin/sh\necho >> {looks}\n"
            f'if [ $(wc -l < {looks}) -le {times} ]; then echo "{words}" >&2; exit 1; fi\n'
            f'exec {pyspy.program()} "$@"\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("DFLASH_PY_SPY", str(path))
        return lambda: len(looks.read_text())

    return put


def test_a_look_that_met_changing_memory_is_taken_again(failing):
    count = failing(2, "Error: Failed to find a python interpreter in the .data section")
    assert any(thread.name == "MainThread" for thread in pyspy.dump(os.getpid()))
    assert count() == 3


@pytest.mark.parametrize(
    ("words", "looks"), [("Error: Permission Denied", 1), ("Error: something else", 3)]
)
def test_a_refusal_is_final_and_other_failures_are_after_three_looks(failing, words, looks):
    count = failing(9, words)
    with pytest.raises(pyspy.Refused, match=words):
        pyspy.dump(os.getpid())
    assert count() == looks


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
    child = stuck(PROGRAMS / "cuda_wait.py", how)
    native = how == "item"  # only C code waits there
    findings = settled(child.pid, has({"drafter-0": state}), native=native)
    assert findings["drafter-0"].state is state, findings["drafter-0"].thread.frames
    assert judge(list(findings.values())).code == "waiting-for-the-device"


@pytest.mark.gpu(2)
def test_two_threads_that_wait_for_different_gpus(stuck):
    child = stuck(PROGRAMS / "cuda_wait.py", "synchronize", "event")
    wanted = {"drafter-0": State.AWAITS_DEVICE, "drafter-1": State.AWAITS_EVENT}
    findings = settled(child.pid, has(wanted))
    assert {name: findings[name].state for name in wanted} == wanted
    verdict = judge(list(findings.values()))
    assert verdict.code == "waiting-for-the-device"
    assert all(name in verdict.summary for name in wanted), verdict


@pytest.mark.gpu
@pytest.mark.parametrize("native", [False, True])
def test_the_deadlock_of_the_compile_lock_and_the_autograd_thread(stuck, tmp_path, native):
    """The program of docs/fxrace.md: DF012 with torch's own lock."""
    page = (ROOT / "docs" / "fxrace.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# deadlock\.py.*?)```", page, re.DOTALL)
    (tmp_path / "deadlock.py").write_text("print('starts', flush=True)\n" + program)
    child = stuck(tmp_path / "deadlock.py", says="starts\n")
    findings = settled(child.pid, lambda seen: judge(list(seen.values())).code == "DF012", native)
    is_the_deadlock(findings.values(), native)


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


@pytest.mark.parametrize("words", [[], ["1", "--name", "x"], ["--run", "/nonexistent"]])
def test_exactly_one_process_is_asked_for(words):
    assert CliRunner().invoke(main, ["stacks", *words]).exit_code == 2


WAITS = "print('stuck', flush=True); input()"


@pytest.fixture
def waits(tmp_path):
    """A program that waits for input."""
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    return program


def test_a_process_is_found_by_its_command_line(stuck, waits):
    child = stuck(waits)
    assert target.of_name(str(waits)).pid == child.pid
    answer = CliRunner().invoke(main, ["stacks", "--name", str(waits)])
    assert "MainThread waits to read" in answer.output
    assert answer.exit_code == 3  # whether somebody will type cannot be told


def test_no_process_or_several_are_refused_with_a_list(stuck, waits):
    with pytest.raises(target.NoTarget, match="0 processes have it"):
        target.of_name(str(waits))
    pids = [stuck(waits, "--api-key", "sesame123").pid for _ in range(2)]
    with pytest.raises(target.NoTarget) as caught:
        target.of_name(str(waits))
    assert all(str(pid) in str(caught.value) for pid in pids)
    assert "sesame" not in str(caught.value)


def test_a_directory_without_a_heartbeat_is_unknown(tmp_path):
    answer = CliRunner().invoke(main, ["stacks", "--run", str(tmp_path)])
    assert answer.exit_code == 3
    assert "no heartbeat can be read there" in answer.output


@pytest.mark.parametrize(
    ("written", "titles", "lines"),
    [
        (45, ["its last 30 events"], 30),
        (12, ["its last 12 events"], 12),
        (1, ["its last event"], 1),
        (0, [], 0),
    ],
)
def test_as_many_events_are_shown_as_is_said(written, titles, lines):
    events = tuple(Event(float(i), "target-0", f"began {i}") for i in range(written))
    loops = (Loop("target-0", "forward", 0.0, 60.0),)
    found = run.after_death(Snapshot(1, 1, loops, events, 100.0, 1e9))
    assert [section.title for section in found.sections] == titles
    shown = [line for section in found.sections for line in section.lines]
    assert len(shown) == lines
    assert not events or shown[-1].endswith(f"began {written - 1}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_where_one_may_not_look_it_says_so_and_what_helps(stuck, waits):
    child = stuck(waits)
    code = (
        "import os, sys\n"
        "from diagnostics.cli import main\n"
        "from diagnostics.stacks import command\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "main(['stacks', sys.argv[1]])\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(child.pid)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 3, told.stderr
    assert "permission" in told.stdout.lower()
    assert "SYS_PTRACE" in told.stdout
    assert f"kill -USR1 {child.pid}" in told.stdout


def test_the_tree_shows_who_waits_for_whom_and_circles_end():
    """a waits for b to end, b for a, and main for a."""
    ids = {"a": 10, "b": 11}
    findings = [
        Finding(
            Thread(name, tid, (Frame("_bootstrap", "/threading.py", 1, ids.get(name)),)),
            State.JOIN,
            object_id=ids[other],
        )
        for tid, (name, other) in enumerate([("a", "b"), ("b", "a"), ("main", "a")])
    ]
    lines = [line.strip() for line in tree.render(tree.of(findings))]
    assert "<- main" in lines
    assert "... and so on, in a circle" in lines
    circle = tree.Waited("b", again=True)
    (root,) = tree.of(findings)
    assert root == tree.Waited("b", (tree.Waited("a", (circle, tree.Waited("main"))),))
