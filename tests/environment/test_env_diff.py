"""Two environments: saved, compared in the order of what matters; secrets stay where they are."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.environment import collect, difference


def env(*words, **variables):
    return CliRunner().invoke(main, ["env", *map(str, words)], env=variables)


@pytest.fixture
def fast(monkeypatch):
    """Without the seconds that importing torch takes."""
    monkeypatch.setattr(collect, "ASK_TORCH", 'print(\'{"version": "9.9"}\')')


def test_an_environment_is_the_same_as_itself(fast, tmp_path):
    saved = tmp_path / "env.json"
    assert env("--save", saved).exit_code == 0
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    answer = env("--diff", saved)
    assert answer.exit_code == 0, answer.output
    assert "are the same" in answer.output


def test_what_matters_comes_first(fast, tmp_path):
    saved = tmp_path / "env.json"
    env("--save", saved)
    found = json.loads(saved.read_text())
    found["torch"]["version"] = "9.8"
    found["system"]["kernel"] = "0.1"
    found["variables"]["OMP_NUM_THREADS"] = "64"
    saved.write_text(json.dumps(found))
    told = json.loads(env("--diff", saved, "--json").output)
    assert list(told["evidence"]) == [
        "torch: version",
        "variables: OMP_NUM_THREADS",
        "system: kernel",
    ]
    assert told["evidence"]["torch: version"] == "9.8  ->  9.9"
    assert "differ in 3 things, of which 2 can change" in told["summary"]


def test_a_variable_that_only_one_side_has(fast, tmp_path):
    saved = tmp_path / "env.json"
    env("--save", saved)
    told = env("--diff", saved, NCCL_DEBUG="INFO")
    assert told.exit_code == 1
    assert "variables: NCCL_DEBUG  -  ->  INFO" in told.output


def test_secrets_are_hidden_before_they_leave(fast, tmp_path):
    saved = tmp_path / "env.json"
    env("--save", saved, HF_TOKEN="hf_sesame1234567890abcdef", PYTHON_INDEX="https://me:sesame@x/")
    assert "sesame" not in saved.read_text()
    assert json.loads(saved.read_text())["variables"]["HF_TOKEN"] == "***"


def test_torch_that_cannot_be_asked_is_unknown_not_the_same():
    unknown = {"torch": {"unknown": "no module"}, "variables": {}}
    verdict = difference.judge(unknown, unknown, ("a", "b"))
    assert (verdict.status, verdict.exit_code) == ("unknown", 3)


def test_torch_itself_is_asked():
    pytest.importorskip("torch")
    told = collect._torch()
    assert {"version", "CUDA", "built as", "inductor settings", "GPUs"} - told.keys() <= {"GPUs"}


def test_the_other_place_needs_python_and_nothing_else(tmp_path):
    """The collector runs alone, under every Python that is here."""
    found = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3")) or [Path(sys.executable)]
    for python in found:
        if int(python.parents[1].name.split(".")[1]) < 8:
            continue
        done = subprocess.run(
            [python, "-I", "-"],
            input=Path(collect.__file__).read_text(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (python, done.stderr)
        assert {"torch", "system", "variables"} <= json.loads(done.stdout).keys()


def test_here_is_compared_with_there(tmp_path, monkeypatch):
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = json.loads(env("--exec-in", "env NCCL_DEBUG=INFO", "--json").output)
    assert told["evidence"]["variables: NCCL_DEBUG"] == "-  ->  INFO"


@pytest.mark.parametrize(("option", "says"), [("--save", "exists"), ("--diff", "is no saved")])
def test_a_wrong_file_is_refused(fast, tmp_path, option, says):
    path = tmp_path / "env.json"
    path.write_text("{}")
    answer = env(option, path)
    assert answer.exit_code == 2
    assert says in answer.output
    assert path.read_text() == "{}"
