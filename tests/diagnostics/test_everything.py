"""`dflash-diag all`: what ran, what did not, and the worst of it as the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diagnostics import everything
from diagnostics.everything import Probe, Told, summed_up
from diagnostics.verdict import Status, Verdict

ROOT = Path(__file__).parents[2]


def told(name, status):
    return Told(Probe(name, (name,)), Verdict(Status(status), "c", f"{name} said so"), 0.1)


@pytest.mark.parametrize(
    ("statuses", "code", "exit_code"),
    [
        (["ok", "ok"], "nothing-found", 0),
        (["ok", "unknown"], "something-unchecked", 3),
        (["unknown", "problem"], "something-found", 1),
    ],
)
def test_the_worst_counts_and_unknown_is_not_fine(statuses, code, exit_code):
    verdict = summed_up([told(f"p{i}", s) for i, s in enumerate(statuses)], [])
    assert (verdict.code, verdict.exit_code) == (code, exit_code)


def test_what_did_not_run_is_said():
    verdict = summed_up([told("env", "ok")], [Probe("stacks", why="not run: add --run DIR")])
    assert verdict.summary == "1 probes found nothing; not run: stacks"
    assert verdict.evidence["stacks"] == "not run: add --run DIR"


@pytest.mark.parametrize("words", [("no-such-command",), ("env", "--no-such-option")])
def test_a_probe_that_does_not_answer_is_unknown(words):
    answer = everything.ask(Probe("x", words)).verdict
    assert (answer.status, answer.code) == ("unknown", "no-answer")
    assert "exit status 2" in answer.summary


def test_a_probe_that_takes_too_long_is_unknown(monkeypatch):
    monkeypatch.setattr(everything, "LIMIT_S", 0.001)
    assert everything.ask(Probe("env", ("env",))).verdict.code == "no-answer"


def test_what_an_answer_has_besides_its_verdict_is_kept():
    told = everything.ask(Probe("stacks", ("stacks", str(os.getpid()))))
    assert set(told.more) == {"sections", "waits", "stacks"}
    assert everything.ask(Probe("env", ("env",))).more == {}


def test_really(tmp_path, monkeypatch):
    """A launch with a flaw and a manifest of other code: both are found, in one call."""
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py | tee train.log\n")
    other = tmp_path / "other"
    other.mkdir()
    manifest, report = tmp_path / "manifest.json", tmp_path / "report.xml"
    diag = [sys.executable, "-m", "diagnostics"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    write = [*diag, "deploy-check", "write", str(other), str(manifest)]
    subprocess.run(write, check=True, env=environment, timeout=60)
    command = [*diag, "all", "--quick", "--launch", str(script), "--manifest", str(manifest)]
    done = subprocess.run(
        [*command, "--json", "--junit", str(report)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    verdict = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert {"launch-check", "deploy-check"} <= set(
        verdict["summary"].split(" found")[0].split(", ")
    )
    assert verdict["evidence"]["launch-check"].startswith("problem: ")
    assert verdict["evidence"]["stacks"] == "not run: add --run DIR"
    assert "of 6, " in done.stderr
    names = {case.get("name") for case in ElementTree.parse(report).iter("testcase")}
    assert {"env", "launch-check"} <= names
