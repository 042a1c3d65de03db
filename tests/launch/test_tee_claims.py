"""The four things that were claimed for `2>&1 | tee train.log`, each with the real tools.

Instead of `tmux new-session -d -s train "bash start.sh > train.log 2>&1"`, the inline pipe was to
(1) keep the shell, and tmux with it, alive after a crash, (2) make the environment explicit,
(3) bring to the disk whatever was written to the pipe, and (4) show the whole command.
"""

import os
import shutil
import subprocess

import pytest

from diagnostics.launch import family

PIPED = "tmux: exec | tee log"


@pytest.mark.parametrize("death", ["raises", "SIGKILL"])
def test_1_the_session_does_not_survive_the_trainer(tried, death):
    """False: the pipeline ends, and so does the shell. What keeps it is a shell behind it."""
    claimed, control = tried((PIPED, death, "-u"), ("tmux: > log; exec bash", death, "-u"))
    assert claimed.session is False
    assert control.session is True


def test_1_but_it_survives_where_a_worker_holds_the_pipe(tried):
    """Which may be how the claim arose: the session stays, and tells nobody that all is over."""
    claimed, control = tried(
        (PIPED, "worker lives", "-u"), ("tmux: exec > log", "worker lives", "-u")
    )
    assert (claimed.session, claimed.orphans) == (True, 1)
    assert (control.session, control.orphans) == (False, 1)


@pytest.fixture
def tmux(short_tmp, tmp_path):
    """tmux with a server of its own, which was started before the launch, as the user's was."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here")
    plain = {k: v for k, v in os.environ.items() if not k.startswith("TMUX")}
    plain["TMUX_TMPDIR"] = str(short_tmp)

    def call(*words, **variables):
        return subprocess.run(
            ["tmux", "-f", "/dev/null", *words],
            env={**plain, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout

    call("new-session", "-d", "-s", "earlier", "cat")
    server = int(call("display-message", "-p", "#{pid}"))
    yield call
    call("kill-server")
    assert family.wait_until(lambda: not family.is_alive(server), 10)
    shutil.rmtree(short_tmp / f"tmux-{os.getuid()}")


ASK = "sh -c 'echo lr=$LR'"


def test_2_the_environment_is_what_stands_in_the_command(tmux, tmp_path):
    """True; and what is exported in one's own shell does not reach a server that runs already."""
    tmux("new-session", "-d", f"LR=6e-4 {ASK} 2>&1 | tee inline.log")
    tmux("new-session", "-d", f"{ASK} 2>&1 | tee exported.log", LR="6e-4")
    assert content(tmp_path / "inline.log") == "lr=6e-4\n"
    assert content(tmp_path / "exported.log") == "lr=\n"


def content(path):
    """As soon as its line is complete."""
    assert family.wait_until(lambda: path.exists() and path.read_text().endswith("\n"), 30)
    return path.read_text()


def test_3_what_was_written_to_the_pipe_reaches_the_disk(tried):
    """True of the pipe. Python's own buffer is in front of it, and dies with the trainer."""
    unbuffered, buffered = tried((PIPED, "SIGKILL", "-u"), (PIPED, "SIGKILL", "default"))
    assert unbuffered.kept == unbuffered.written == 200
    assert buffered.kept < buffered.written
    (redirect,) = tried(("tmux: exec > log", "SIGKILL", "default"))
    assert redirect.kept == buffered.kept  # the pipe makes no difference


def test_4_the_whole_command_can_be_seen(tmux, tmp_path):
    """True, while the session is there: tmux shows what it was given, not what a script says."""
    (tmp_path / "start.sh").write_text("exec cat\n")
    tmux("new-session", "-d", "-s", "inline", "cat --show-all 2>&1 | tee train.log")
    tmux("new-session", "-d", "-s", "script", "bash start.sh > script.log 2>&1")
    shown = {
        name: tmux("display-message", "-p", "-t", name, "#{pane_start_command}")
        for name in ("inline", "script")
    }
    assert "cat --show-all 2>&1 | tee train.log" in shown["inline"]
    assert "cat" not in shown["script"]


def test_and_it_hides_the_exit_status(tried):
    """Which nobody claimed: the pane that remains shows tee's."""
    piped, redirected = tried(("exec | tee log", "raises", "-u"), ("exec > log", "raises", "-u"))
    assert (piped.status, redirected.status) == (0, 1)
