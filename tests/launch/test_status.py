"""`dflash-diag launch status`: whoever is killed, the record stays true."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.launch import family, journal, launcher, onsite, status
from diagnostics.verdict import Status
from tests.launch.launching import PYTHON, STAY, WITHIN_S, end, launch, stages, wait_for

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
MANNERS = [pytest.param(True, id="tmux", marks=needs_tmux), pytest.param(False, id="setsid")]
# Ends as soon as it is told to, with status 3.
ENDS = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
print('step 1')
while True: signal.pause()
"""
SILENT = ENDS.replace("print('step 1')", "open('ready', 'w')")


# SIGKILL of any one in the chain.


@pytest.mark.parametrize("tmux", MANNERS)
def test_the_client_is_killed(desk, tmux):
    """While it waits: the trainer runs on, and its end is written down."""
    manner = "--tmux" if tmux else "--setsid"
    words = ("launch", "--name", "train", "--log", "train.log", manner, "--", *PYTHON, SILENT)
    env = {**os.environ, "PYTHONPATH": str(launcher.ROOT)}
    client = subprocess.Popen(
        [sys.executable, "-m", "diagnostics", *words], env=env, stderr=subprocess.DEVNULL
    )
    assert family.wait_until(lambda: (desk / "ready").exists(), WITHIN_S)
    client.kill()
    assert client.wait(WITHIN_S) == -signal.SIGKILL
    assert status.probe("train").code == "launch-silent"
    end("exec", signal.SIGUSR1)
    assert wait_for("launch-exited").summary.startswith("train exited 3")


def test_the_client_is_killed_before_anything_was_started(desk):
    """Nobody has taken the name then."""
    launch("pass")
    client = {**stages()["client"], "run": "killed"}
    journal.append(journal.journal_of("train"), client | {"start_ticks": 1})
    verdict = status.probe("train")
    assert (verdict.status, verdict.code) == (Status.UNKNOWN, "launch-vanished")
    assert "before anything was started" in verdict.summary
    assert launch(STAY, log="next.log").code == "launch-running"


@pytest.mark.parametrize("tmux", MANNERS)
def test_the_supervisor_is_killed(desk, tmux):
    """The trainer runs on; that nobody will see its end is said, and then that nobody did."""
    launch(ENDS, tmux=tmux)
    end("supervisor", signal.SIGKILL)
    verdict = wait_for("launch-unwatched")
    assert verdict.status is Status.PROBLEM
    assert launch(STAY, log="other.log").code == "launch-name-live"
    end("exec", signal.SIGUSR1)
    verdict = wait_for("launch-vanished")
    assert verdict.status is Status.UNKNOWN
    assert "exit status" in verdict.evidence["cannot be known"]
    assert verdict.evidence["last lines"] == "step 1"
    if tmux:
        assert verdict.evidence["supervisor"] == "ended with signal 9, says tmux"


@pytest.mark.parametrize("tmux", MANNERS)
def test_the_trainer_is_killed(desk, tmux):
    launch(STAY, tmux=tmux)
    end("exec", signal.SIGKILL)
    verdict = wait_for("launch-killed")
    assert verdict.summary.startswith("train was killed by SIGKILL after ")
    assert verdict.evidence["last lines"] == "step 1"


def test_the_shell_around_the_trainer_is_killed(desk):
    """What it had started lives on, and is named."""
    launch(("sh", "-c", '"$@"; exit $?', "sh", *PYTHON, STAY))
    end("exec", signal.SIGKILL)
    verdict = wait_for("launch-killed")
    (left,) = stages()["exit"]["left"]
    assert f"still running of it: {left['pid']}" in verdict.summary
    assert os.readlink(f"/proc/{left['pid']}/fd/1") == str(desk / "train.log")


@needs_tmux
@pytest.mark.parametrize("blow", ["kill -9 of the server", "kill-session"])
def test_tmux_is_killed(desk, blow):
    """Neither the trainer nor its supervisor minds; a terminal's hang-up is no SIGHUP for it."""
    launch(ENDS, tmux=True)
    if blow == "kill-session":
        subprocess.run(["tmux", "kill-session", "-t", "=train"], check=True)
    else:
        asked = ["tmux", "display-message", "-p", "#{pid}"]
        server = subprocess.run(asked, capture_output=True, text=True, check=True)
        os.kill(int(server.stdout), signal.SIGKILL)
    assert family.wait_until(lambda: "hang-up" in stages(), WITHIN_S)
    assert status.probe("train").code == "launch-running"
    end("exec", signal.SIGUSR1)
    assert wait_for("launch-exited").summary.startswith("train exited 3")


WAITS = ("sh", "-c", '"$@"; exit $?', "sh")


# What ssh does with the output: it passes on what it reads.
PASSES = (
    "import subprocess, sys\n"
    "there = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)\n"
    "for line in there.stdout: print(line.decode(), end='', flush=True)\n"
    "sys.exit(there.wait())"
)


def test_the_prefix_is_killed_but_what_it_started_still_reports(desk):
    launch(ENDS, prefix=WAITS)
    end("prefix", signal.SIGKILL)
    assert status.probe("train").code == "launch-running"
    end("exec", signal.SIGUSR1)
    assert wait_for("launch-exited").summary.startswith("train exited 3")


def test_the_connection_is_lost(desk):
    """The trainer is not: it is looked for by another way."""
    launch(ENDS, prefix=(*PYTHON, PASSES))
    end("prefix", signal.SIGKILL)
    assert wait_for("launch-unwatched").status is Status.PROBLEM
    end("exec", signal.SIGUSR1)
    verdict = wait_for("launch-vanished")
    assert "the way to it was lost" in verdict.summary
    assert verdict.evidence["--exec-in"].startswith("ended with SIGKILL")


def test_the_supervisor_on_this_side_of_a_prefix_is_killed(desk):
    launch(ENDS, prefix=WAITS)
    end("supervisor", signal.SIGKILL)
    assert wait_for("launch-unwatched").status is Status.PROBLEM
    end("exec", signal.SIGUSR1)
    assert wait_for("launch-vanished").status is Status.UNKNOWN


# A number is not a process.


def rewrite(stage, **changes):
    """The same journal, with this stage changed."""
    path = journal.journal_of("train")
    found = journal.records(path)
    path.write_text("")
    for record in found:
        journal.append(path, {**record, **changes} if record["stage"] == stage else record)


@pytest.fixture
def orphaned(desk):
    """A launch whose supervisor is gone, while the trainer runs."""
    launch(STAY)
    end("supervisor", signal.SIGKILL)
    assert status.probe("train").code == "launch-unwatched"
    trainer = stages()["exec"]["pid"]
    yield
    os.kill(trainer, signal.SIGKILL)


def test_a_later_process_with_the_same_number_is_not_the_trainer(orphaned):
    rewrite("exec", start_ticks=stages()["exec"]["start_ticks"] - 1)
    assert status.probe("train").code == "launch-vanished"


def test_nor_is_one_after_the_machine_was_restarted(orphaned):
    """Even with the same number and the same ticks since boot."""
    for stage in ("client", "supervisor", "exec"):
        rewrite(stage, boot_id="another boot")
    verdict = status.probe("train")
    assert verdict.code == "launch-vanished"
    assert "this machine was restarted since" in verdict.summary


def test_a_line_that_a_crash_tore_does_not_spoil_the_journal(desk):
    launch("raise SystemExit(3)")
    with open(journal.journal_of("train"), "a") as file:
        file.write('{"run": "x", "sta')
    assert status.probe("train").summary.startswith("train exited 3")


# All of them.


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_of_all_launches_the_worst_is_the_exit_code(desk, words):
    def show_all():
        return CliRunner().invoke(main, ["launch", "status", *words])

    assert show_all().exit_code == 0  # nothing was launched
    launch("pass", name="well", log="well.log", ends=True)
    assert show_all().exit_code == 0
    launch("pass", name="lost", log="lost.log")
    client = {**stages("lost")["client"], "run": "lost", "start_ticks": 1}
    journal.append(journal.journal_of("lost"), client)
    assert show_all().exit_code == 3
    launch("raise SystemExit(3)", name="failed", log="failed.log", ends=True)
    answer = show_all()
    assert answer.exit_code == 1
    assert "well exited 0" in answer.output
    assert "failed exited 3" in answer.output


# The log.


@pytest.mark.parametrize(
    ("change", "said"),
    [("deleted", "not there any more"), ("replaced", "not the file that it opened")],
)
def test_a_log_that_is_not_the_one_that_was_opened(desk, change, said):
    launch(STAY)
    (desk / "train.log").unlink()
    if change == "replaced":
        (desk / "train.log").write_text("another run's\n")
    assert said in status.probe("train").evidence["log"]


def test_of_a_long_log_the_last_lines_are_shown_without_secrets(desk):
    code = "for i in range(30000): print('step', i)\nprint('--api-key 0123456789abcdef')"
    verdict = launch(code, ends=True)
    assert verdict.evidence["last lines"].splitlines()[:2] == ["step 29991", "step 29992"]
    assert "0123456789abcdef" not in str(verdict)


def test_memory_that_the_kernel_wanted_back_is_mentioned(desk):
    launch(STAY)
    end("exec", signal.SIGKILL)
    assert "memory" not in wait_for("launch-killed").evidence
    rewrite("exit", out_of_memory=1)
    assert "killed 1 process" in status.probe("train").evidence["memory"]


def test_identity_of_the_dead_and_of_this_process():
    child = subprocess.Popen([*PYTHON, "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert onsite.identity(child.pid) is None  # a zombie
    child.wait()
    assert onsite.identity(child.pid) is None
    assert onsite.is_alive(onsite.identity(os.getpid()))
