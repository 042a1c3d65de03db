"""Real launches: that each death is what it is called, and what each shape keeps of it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from diagnostics.launch import family, pool, trial
from diagnostics.launch.deaths import BUFFERINGS, DEATHS, Blow
from diagnostics.launch.losses import judged, losses, seen_right, true_status
from diagnostics.launch.shapes import EXEC, PIPE, SHAPES, Look
from diagnostics.launch.trial import Cell, Result
from diagnostics.reproducers import Outcome

ROOT = Path(__file__).parents[2]
NEVER_STARTS = {"> missing/log"}
LOGLESS = {"> missing/log", "| tee missing/log"}
# Standard error is not in the log: `>` alone, in the wrong order, or read by dash.
WITHOUT_TRACEBACK = {"> log, no 2>&1", "2>&1 > log", "| tee log, no 2>&1", "&> log, in dash"}
HIDES = {PIPE, "| tee log", "| tee log, no 2>&1", "&> log, in dash", "setsid -f"}


def test_each_death_is_what_it_is_called(tried):
    """What bash has in $? is what the death claims; its last words are in the log."""
    deaths = [d for d in DEATHS.values() if d.ends is not None and d.blow in OWN_OR_SIGNAL]
    results = tried(*((EXEC, death.name, "-u") for death in deaths))
    for death, result in zip(deaths, results, strict=True):
        assert seen_right(death.ends, result.status), (death.name, result)
        assert result.kept == result.written == 200, (death.name, result)
        assert result.last_words is (True if death.last_words else None), (death.name, result)
        assert not losses(SHAPES[EXEC], death, result)


OWN_OR_SIGNAL = {Blow.NONE, Blow.TERM, Blow.KILL}


def test_what_each_shape_keeps_of_an_exception(tried):
    shapes = [s for s in SHAPES.values() if not s.races]
    cells = [Cell(shape.name, "raises", "-u") for shape in shapes]
    shapes = [shape for shape, c in zip(shapes, cells, strict=True) if not trial.why_not(c)]
    results = tried(*((shape.name, "raises", "-u") for shape in shapes))
    for shape, result in zip(shapes, results, strict=True):
        told = (shape.name, result)
        assert result.started is (shape.name not in NEVER_STARTS), told
        assert result.log is (shape.name not in LOGLESS), told
        if shape.name in LOGLESS:
            continue
        assert result.last_words is (shape.name not in WITHOUT_TRACEBACK), told
        knows = shape.look is not Look.NOWHERE and shape.name not in HIDES
        assert (result.status == 1) is knows, told


def test_buffering(tried):
    results = tried(*((EXEC, "SIGKILL", buffering) for buffering in BUFFERINGS))
    lossy = {n for n, r in zip(BUFFERINGS, results, strict=True) if r.kept < r.written}
    assert lossy == {"default", "PYTHONUNBUFFERED=0", "PYTHONBUFFERED=1", "stdbuf -oL"}


def test_who_survives_a_lost_terminal(tried):
    survives = {
        EXEC: False,
        PIPE: False,
        "&": False,
        "nohup &": True,
        "setsid -f": True,
        "& disown": True,
        "trap '' HUP &": True,
    }
    results = tried(*((shape, "hang-up", "-u") for shape in survives))
    assert {s: r.survived for s, r in zip(survives, results, strict=True)} == survives


def test_the_printed_process_id(tried):
    """A wrapper's: SIGTERM to it leaves the trainer running. With exec it is the trainer's."""
    wrapper, through_exec, tee = tried(
        *((name, "kill printed PID", "-u") for name in ("nohup script &", "nohup exec &")),
        ("| tee log &", "kill printed PID", "-u"),
    )
    assert (wrapper.pid_is_trainers, wrapper.survived) == (False, True)
    assert (through_exec.pid_is_trainers, through_exec.survived) == (True, False)
    assert tee.pid_is_trainers is False


def test_tmux(tried):
    """The session goes with the trainer, and with it the exit status; remain-on-exit keeps both."""
    plain, remaining, shell = tried(
        ("tmux: exec > log", "SIGKILL", "-u"),
        ("tmux: remain-on-exit", "SIGKILL", "-u"),
        ("tmux: > log; exec bash", "SIGKILL", "-u"),
    )
    assert (plain.session, plain.status) == (False, None)
    assert (remaining.session, remaining.status) == (True, -signal.SIGKILL)
    assert (shell.session, shell.status) == (True, None)


def test_a_worker_that_lives_on_holds_a_pipe_open(tried):
    redirect, pipe = tried((EXEC, "worker lives", "-u"), (PIPE, "worker lives", "-u"))
    assert (redirect.orphans, redirect.hangs, redirect.status) == (1, False, 137)
    assert (pipe.orphans, pipe.hangs) == (1, True)
    death = DEATHS["worker lives"]
    assert losses(SHAPES[PIPE], death, pipe) == ["its end: the launch still waits"]


def test_a_full_disk_takes_the_tail_without_a_word(tried):
    """Python's last flush fails, its status is 0: as measured on 3.11."""
    redirect, control = tried((EXEC, "disk full", "default"), (EXEC, "exit 0", "default"))
    assert (redirect.kept, redirect.returned) == (128, True)
    assert control.kept == 200
    assert redirect.status in (0, 120)


def test_a_victim_of_a_killed_tee_cannot_even_say_so(tried):
    printing, logging = tried((PIPE, "tee killed", "default"), (PIPE, "tee killed", "logging"))
    assert not printing.returned
    assert printing.kept < printing.written
    assert logging.kept == 200


# Like one that has not had its turn when the victim has written everything, on a busy machine.
BUSY_TEE = """
import pathlib, shutil, sys
record = pathlib.Path("..", "record")
while not record.exists() or b"written" not in record.read_bytes(): pass
for _ in range(5_000_000): pass
with open(sys.argv[1], "wb", buffering=0) as log: shutil.copyfileobj(sys.stdin.buffer.raw, log)
"""
WAITING_TEE = """
import signal, sys
open(sys.argv[1], "w").close()
signal.pause()
"""


@pytest.fixture
def tee(tmp_path, monkeypatch):
    """A function that puts another `tee` in front of the installed one."""

    def put(code):
        (tmp_path / "tee").write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / "tee").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.mark.parametrize("death", ["hang-up", "tee killed"])
def test_what_is_lost_does_not_depend_on_who_had_his_turn(death, tee, tried):
    """A tee that is behind because the machine is busy is given the time to read."""
    tee(BUSY_TEE)
    (result,) = tried((PIPE, death, "-u"))
    assert (result.kept, result.survived) == (200, False)


def test_what_tee_has_not_read_dies_with_it(tee, tried):
    """The control: it can be lost, and then that is what the table says."""
    tee(WAITING_TEE)
    (result,) = tried((PIPE, "hang-up", "-u"))
    assert losses(SHAPES[PIPE], DEATHS["hang-up"], result) == ["200 of 200 lines", "the run"]
    assert "what tee has not read" in DEATHS["hang-up"].meaning


def test_what_is_no_loss():
    """A trial that told nothing proves nothing, in neither direction."""
    unclear = Result(started=True, log=False, kept=0, written=200, unclear="too slow")
    assert losses(SHAPES[EXEC], DEATHS["raises"], unclear) == []
    assert judged(SHAPES[EXEC], DEATHS["raises"], unclear) == (Outcome.CANNOT_TELL, "too slow")


def test_a_status_that_was_hidden_is_a_loss():
    seen = Result(started=True, log=True, kept=200, written=200, last_words=True, status=0)
    assert losses(SHAPES[PIPE], DEATHS["raises"], seen) == ["exit status 1 (seen: 0)"]
    right = Result(started=True, log=True, kept=200, written=200, last_words=True, status=1)
    assert losses(SHAPES[EXEC], DEATHS["raises"], right) == []


def test_a_death_that_did_not_kill_ends_with_0():
    ignored = Result(started=True, log=True, kept=200, written=200, returned=True, status=0)
    assert true_status(DEATHS["SIGHUP"], ignored) == 0


def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    (tmp_path / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trial.why_not(Cell("tmux: > log", "raises", "-u")) == "no tmux here"
    assert trial.why_not(Cell(EXEC, "raises", "-u")) is None
    assert trial.why_not(Cell(EXEC, "tee killed", "-u")) == ""


def boom(item):
    raise ValueError(f"no {item}")


def leave(_item):
    os._exit(3)


def own_pid(_item):
    return os.getpid()


def test_a_failing_trial_is_not_a_result():
    with pytest.raises(pool.Broken, match=r"ValueError: no [12]"):
        list(pool.results([1, 2, 3], boom))
    with pytest.raises(pool.Broken, match="process died"):
        list(pool.results([1, 2, 3], leave))


def test_workers_are_few_and_end():
    pids = {pid for _, pid in pool.results(range(5), own_pid, at_once=2)}
    assert 1 <= len(pids) <= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def told(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def once_made(real):
    return lambda *args, **options: (real(*args, **options), told())[0]


def before_it_is_removed(real):
    return lambda *args, **options: (told(), real(*args, **options))[1]


def told_once_made(_item):
    """A trial to which SIGTERM comes the moment its directory is there, and nobody knows it yet."""
    tempfile.mkdtemp = once_made(tempfile.mkdtemp)
    return trial.run(Cell(EXEC, "raises", "-u"))


def told_before_it_is_removed(_item):
    """A trial to which SIGTERM comes when it is over, and its directory is about to be removed."""
    shutil.rmtree = before_it_is_removed(shutil.rmtree)
    return trial.run(Cell(EXEC, "raises", "-u"))


def left_at_once(act):
    """The control: what SIGTERM does if it is not put off until the trial waits."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return act(None)


TOLD = (told_once_made, told_before_it_is_removed)


@pytest.mark.parametrize("act", TOLD)
def test_sigterm_leaves_no_directory_at_any_moment(act, short_tmp):
    with pytest.raises(pool.Broken, match="process died"):
        list(pool.results([0], act, at_once=1))
    assert list(short_tmp.iterdir()) == []
    with pytest.raises(pool.Broken, match="process died"):
        list(pool.results([act], left_at_once, at_once=1))
    (left,) = short_tmp.iterdir()
    shutil.rmtree(left)


def waits_for_ever(_item):
    told()
    family.wait_until(pool.leave_if_told, 600)


def test_a_trial_is_left_where_it_waits():
    """No answer comes, and the worker ends long before what it waited for."""
    with pytest.raises(pool.Broken, match="process died"):
        list(pool.results([0], waits_for_ever, at_once=1))


LONG = """
from diagnostics.launch import matrix
if __name__ == "__main__":
    matrix.probe(full=False, resume=False, show=lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_table(number, short_tmp, tmp_path):
    """No process, no tmux server, no directory; asked of all that inherited a variable."""
    program = tmp_path / "long.py"
    program.write_text(LONG)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(short_tmp)}
    env["DFLASH_TEST_MARK"] = mark = str(short_tmp)
    with subprocess.Popen(
        [sys.executable, str(program)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as table:
        rows = (line for line in table.stdout if line.startswith(EXEC.encode()))
        assert next(rows)  # it is in the midst of it
        assert marked(mark)  # the control
        table.send_signal(number)
    assert table.returncode != 0
    assert family.wait_until(lambda: not marked(mark), 30), marked(mark)
    assert family.wait_until(lambda: not list(short_tmp.iterdir()), 10)


def marked(mark):
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        if (process.info["environ"] or {}).get("DFLASH_TEST_MARK") == mark:
            found.append(process.info["cmdline"])
    return found
