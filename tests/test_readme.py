"""Every command in the README works; the two `make` commands are run by .ci/run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "fixtures" / "tiny-qwen3"
COMMANDS = re.findall(r"^\$ (.+?)(?:\s{2,}#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
VERBS = ("open", "read", "parse", "write", "split", "find", "load", "close", "send", "sort", "copy")


# fxrace exits 1 where the installed torch has the failures that it looks for; the launches in the
# README lose something, and die; whether something holds a GPU is the machine's affair.
ALSO_FINE = {"fxrace": (0, 1), "launch": (0, 1), "launch-check": (0, 1), "preflight": (0, 1, 3)}


def needs_gpus(command: str) -> bool:
    return "--target-gpus 0" in command


def run(arguments: list[str], cwd: Path, variables: dict[str, str]) -> str:
    """Run one of the two commands in this Python, with $VARIABLES replaced as a shell would."""
    package = {"dflash": "dflash", "dflash-diag": "diagnostics"}[arguments[0]]
    given = [re.sub(r"\$(\w+)", lambda m: variables[m[1]], part) for part in arguments[1:]]
    done = subprocess.run(
        [sys.executable, "-m", package, *given],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(cwd / "state"),
        },
    )
    assert done.returncode in ALSO_FINE.get(arguments[1], (0,)), (
        f"{arguments}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 6
    assert {shlex.split(command)[0] for command in COMMANDS} == {"dflash", "dflash-diag"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if needs_gpus(c)])
def test_commands_for_many_gpus_are_accepted(command, tmp_path):
    """No machine of CI has them, so that `dflash config` reads the options instead."""
    arguments = shlex.split(command)
    assert arguments[:2] == ["dflash", "train"]
    assert "cuda:7" in run(["dflash", "config", *arguments[2:]], tmp_path, {})


def test_all_other_commands_run_in_order(tmp_path):
    variables = {
        "TARGET": str(TARGET),
        "PROMPTS": str(tmp_path / "prompts.txt"),
        "DATA": str(tmp_path / "data"),
        "OUT": str(tmp_path / "run"),
    }
    prompts = [f"def {verb}_file(self):\n" for verb in VERBS]
    Path(variables["PROMPTS"]).write_text("".join(prompts))
    for command in COMMANDS:
        if not needs_gpus(command):
            run(shlex.split(command), tmp_path, variables)
    assert list((tmp_path / "run").glob("step-*"))
    shutil.rmtree(tmp_path / "run")
