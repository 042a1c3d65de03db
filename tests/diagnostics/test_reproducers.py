"""Running reproducers: what each way to end is called, and that nothing is left behind."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from diagnostics.reproducers import Outcome, run

SAYS = "import json, sys; print('noise'); print(json.dumps({'reason': 'because'})); sys.exit(%d)"


@pytest.fixture
def program(tmp_path):
    def write(code: str) -> Path:
        path = tmp_path / "df999_test.py"
        path.write_text(code)
        return path

    return write


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(10, Outcome.REPRODUCED), (0, Outcome.ABSENT), (125, Outcome.CANNOT_TELL)],
)
def test_exit_codes(program, code, outcome):
    result = run(program(SAYS % code), timeout_s=30)
    assert (result.outcome, result.reason) == (outcome, "because")


def test_an_uncaught_exception_is_a_crash_and_never_reproduced(program):
    result = run(program("raise RuntimeError('boom')"), timeout_s=30)
    assert result.outcome is Outcome.CRASHED
    assert result.reason == "exit code 1: RuntimeError: boom"


def test_a_signal_is_named(program):
    result = run(program("import os; os.abort()"), timeout_s=30)
    assert result.outcome is Outcome.CRASHED
    assert "SIGABRT" in result.reason


@pytest.mark.parametrize("code", ["", "print('[]')", "print('{broken')"])
def test_an_exit_code_without_its_json_is_not_believed(program, code):
    result = run(program(code), timeout_s=30)
    assert result.outcome is Outcome.CANNOT_TELL
    assert "no JSON" in result.reason


def test_a_hang_is_a_finding_and_its_whole_group_is_killed(program, tmp_path):
    pid_file = tmp_path / "pid"
    hang = program(
        "import os, subprocess, sys, threading\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; "
        "threading.Event().wait()'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "threading.Event().wait()\n"
    )
    result = run(hang, timeout_s=8)
    assert result.outcome is Outcome.HUNG
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid_file.read_text()))
        with suppress(psutil.TimeoutExpired):  # a zombie that nobody reaps never goes away
            left.wait(timeout=5)
        assert left.status() == psutil.STATUS_ZOMBIE


def test_the_child_does_not_import_from_the_working_directory(program, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise RuntimeError('wrong json')")
    monkeypatch.chdir(elsewhere)
    assert run(program(SAYS % 0), timeout_s=30).outcome is Outcome.ABSENT
