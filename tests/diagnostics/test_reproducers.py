"""Running children: what each way to end is called, and that nothing is left behind."""

import signal
from contextlib import suppress

import psutil
import pytest

from diagnostics.reproducers import follow, last_line, said


@pytest.fixture
def run(tmp_path):
    """Run these lines as a program; returns how it ended, and the lines that it said."""

    def start(*lines, quiet_s=30.0, also=lambda _line: None, **more):
        program = tmp_path / "df999_test.py"
        program.write_text("\n".join(lines))
        heard = []

        def hear(line):
            heard.append(line)
            also(line)

        return follow(program, [], hear, quiet_s=quiet_s, **more), heard

    return start


def test_lines_are_heard_as_they_come(run):
    ended, heard = run("import sys", "print('one')", "print()", "sys.stdout.write('two')")
    assert (ended.code, heard) == (0, ["one", "", "two"])


@pytest.mark.parametrize(
    ("line", "code", "how"),
    [
        ("raise RuntimeError('boom')", 1, "exit code 1: RuntimeError: boom"),
        ("import os; os.abort()", -signal.SIGABRT, "it was killed by SIGABRT: no message"),
        ("raise SystemExit(125)", 125, "exit code 125: no message"),
    ],
)
def test_how_it_ended_is_said(run, line, code, how):
    ended, _ = run(line)
    assert (ended.code, ended.how()) == (code, how)


def test_a_hang_is_looked_at_and_its_whole_group_is_killed(run, tmp_path):
    looked_at = []
    ended, heard = run(
        "import os, signal, sys",
        "child = os.fork()",
        "if child: print(child, flush=True)",
        "signal.pause()",
        quiet_s=2.0,
        before_killing=looked_at.append,
    )
    assert ended.code is None
    assert "said nothing for too long" in ended.how()
    assert len(looked_at) == 1
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(heard[0]))
        with suppress(psutil.TimeoutExpired):  # a zombie that nobody reaps never goes away
            left.wait(timeout=5)
        assert left.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_speaks_is_not_silent(run):
    """The limit is on silence, not on the whole run."""
    talk = ["import threading", "for _ in range(4):", " threading.Event().wait(0.5)"]
    ended, heard = run(*talk, " print('still here', flush=True)", quiet_s=1.5)
    assert (ended.code, len(heard)) == (0, 4)


def test_an_interrupt_leaves_no_child_behind(run):
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    program = ["import os, signal", "print(os.getpid(), flush=True)", "signal.pause()"]
    with pytest.raises(KeyboardInterrupt):
        run(*program, also=interrupt)
    assert not psutil.pid_exists(pids[0])


def test_the_child_does_not_import_from_the_working_directory(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise RuntimeError('wrong json')")
    monkeypatch.chdir(elsewhere)
    assert run("import json")[0].code == 0


def test_what_is_no_json_object_says_nothing():
    assert said('{"outcome": "absent"}') == {"outcome": "absent"}
    assert said("[1]") == said("{broken") == said("") == {}


def test_the_last_words():
    assert last_line("one\ntwo\n\n  \n") == "two"
    assert last_line("") == "no message"
