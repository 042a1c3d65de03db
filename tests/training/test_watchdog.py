"""A run that gets stuck, as its user meets it: who, where, since when, and a bounded end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import heartbeat

STICK = """
import ctypes, threading
import dflash.forward_backward as module
real, calls = module.block_losses, []
def stick(*args):
    if threading.current_thread().name == "drafter-1":
        calls.append(1)
        if len(calls) > {after}:
            {how}
    return real(*args)
module.block_losses = stick
"""
IN_PYTHON = "threading.Event().wait()"
IN_C = "ctypes.CDLL(None).sleep(300)"
HOLDING_THE_GIL = "ctypes.PyDLL(None).sleep(300)"


@pytest.fixture
def stuck(options):
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    options["run"] |= {"start-timeout-s": 4.0, "stall-timeout-s": 3.0, "stop-grace-s": 1.0}
    return options


def dumps(options):
    return [p.read_text() for p in Path(options["run"]["output-dir"]).glob("stacks-*.txt")]


@pytest.mark.parametrize("how", [IN_PYTHON, IN_C])
@pytest.mark.parametrize(("after", "phase"), [(0, "warming up"), (2, "forward and backward of")])
def test_a_stuck_loop_is_named_with_its_stack(stuck, run_child, how, after, phase):
    child = run_child(STICK.format(after=after, how=how))
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 70, said
    assert re.search(rf"drafter-1 is past its limit: '{phase}.*' for \d+ s, limit [\d.]+ s", said)
    (dump,) = dumps(stuck)
    assert dump.startswith(f"problem: drafter-1 has been at '{phase}")
    first = dump.partition("stacks, most telling first\n")[2].splitlines()
    assert first[0].startswith("  drafter-1 ")
    assert any("in stick" in line or "stick (" in line for line in first[:6])


def test_the_process_is_ended_where_the_stuck_thread_holds_the_gil(stuck, run_child):
    quick = "import dflash.watched as watched\nwatched.KILL_AFTER_S = 1.0\n"
    child = run_child(quick + STICK.format(after=2, how=HOLDING_THE_GIL))
    said = child.communicate(timeout=120)[1]
    assert child.returncode == -signal.SIGKILL, said
    assert "is past its limit and the process has not ended within 2 s: killed" in said
    assert "problem: drafter-1 holds the GIL in C code" in said
    log = (Path(stuck["run"]["output-dir"]) / "train.log").read_text()
    assert "is past its limit" in log


def test_without_a_right_to_look_the_process_dumps_itself(stuck, run_child):
    """py-spy is taken away: the stacks are faulthandler's."""
    no_py_spy = "import os\nos.environ['DFLASH_PY_SPY'] = '/nonexistent/py-spy'\n"
    child = run_child(no_py_spy + STICK.format(after=2, how=IN_C))
    child.communicate(timeout=120)
    (dump,) = dumps(stuck)
    assert "stacks as the process wrote them itself" in dump
    assert re.search(r'File ".*", line \d+ in stick', dump)


def test_where_it_is_only_told_the_run_goes_on(stuck, run_child):
    stuck["run"]["on-stuck"] = "dump"
    slow = (
        "while not [f for f in os.listdir(module.OUT) if f.startswith('stacks-2')]: "
        "threading.Event().wait(0.1)"
    )
    out = stuck["run"]["output-dir"]
    stuck["run"]["stall-timeout-s"] = 30.0
    quick = "import os\nimport dflash.trainer as trainer\ntrainer.AHEAD = 0.02\n"
    where = f"import dflash.forward_backward as module\nmodule.OUT = {out!r}\n"
    child = run_child(quick + where + STICK.format(after=2, how=slow))
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 0, said
    assert "drafter-1 is past its limit" in said
    assert "finished: " in said


def test_a_watchdog_that_dies_is_told_and_the_run_goes_on(stuck, run_child):
    kills = (
        "if len(calls) == 3: import psutil; "
        "[p.kill() for p in psutil.Process().children() if 'dflash.watchdog' in p.cmdline()]; "
        "[t.join() for t in threading.enumerate() if t.name == 'watchdog']"
    )
    child = run_child(STICK.format(after=2, how=kills))
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 0, said
    assert said.count("the watchdog has ended: from here on nobody sees a loop that is stuck") == 1
    assert "finished: " in said


def test_sigusr1_gives_the_stacks_and_stops_nothing(stuck, run_child):
    stuck["run"] |= {"stall-timeout-s": 60.0, "start-timeout-s": 60.0}
    held = (
        "print('HELD', file=__import__('sys').stderr, flush=True);"
        " threading.Event().wait() if not module.RELEASED.wait(60) else None"
    )
    release = (
        "import signal, threading\n"
        "import dflash.watched as watched\n"
        "real_log = watched.log.warning\n"
        "def told(*args):\n"
        "    real_log(*args)\n"
        "    module.RELEASED.set()\n"
        "watched.log.warning = told\n"
    )
    patch = STICK.format(after=2, how="hold()") + (
        "module.RELEASED = threading.Event()\n"
        "def hold():\n"
        "    if not module.RELEASED.is_set():\n"
        f"        {held}\n"
    )
    child = run_child(patch + release)
    for line in child.stderr:
        if "HELD" in line:
            break
    child.send_signal(signal.SIGUSR1)
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 0, said
    assert re.search(r"stacks in \S+stacks-\S+\.txt: ", said)


def test_a_killed_run_leaves_its_last_words(stuck, run_child):
    stuck["run"] |= {"stall-timeout-s": 60.0, "start-timeout-s": 60.0}
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    child = run_child(STICK.format(after=2, how=kill))
    said = child.communicate(timeout=120)[1]
    assert child.returncode == -signal.SIGKILL
    assert re.search(r"ERROR watchdog the trainer \(pid \d+\) has died without a word", said)
    assert "drafter-1: forward and backward of batch" in said

    command = [sys.executable, "-m", "diagnostics", "stacks", "--run", stuck["run"]["output-dir"]]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert "died in the middle of its work" in told.stdout
    assert "drafter-1: forward and backward of batch" in told.stdout
    assert re.search(r"-\d+\.\d+ s  \S+-\d +(forward|batch|waits for) ", told.stdout)


def test_a_run_that_ended_says_so(stuck, run_child):
    stuck["run"] |= {"stall-timeout-s": 60.0, "start-timeout-s": 60.0}
    child = run_child()
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 0, said
    assert "watchdog" not in said
    command = [sys.executable, "-m", "diagnostics", "stacks", "--json", "--run"]
    told = subprocess.run(
        [*command, stuck["run"]["output-dir"]], capture_output=True, text=True, timeout=60
    )
    assert json.loads(told.stdout)["code"] == "run-ended"
    beats = heartbeat.read(Path(stuck["run"]["output-dir"]) / heartbeat.FILE)
    assert not os.path.exists(f"/proc/{beats.pid}")
