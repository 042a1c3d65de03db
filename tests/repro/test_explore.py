"""The search of interleavings on torch's own code, as the program it is.

What is expected was measured on torch 2.13; on another torch only the form is checked.
"""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("the search needs torch", allow_module_level=True)

REPRO = Path(__file__).parents[2] / "repro"
EXIT_CODES = {"reproduced": 10, "absent": 0, "cannot tell": 125}
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
TORCH = importlib.metadata.version("torch")
ROW_KEYS = {
    *("scenario", "cure", "outcome", "schedules", "bad", "complete", "preemptions"),
    *("bad_set", "unclear", "seconds", "roles", "schedule"),
}
CONTROL, NO_OP, HOLDING = "none", "module-class-swap", "shipped"
SCENARIOS = ("trace-call", "trace-module", "trace-op", "trace-trace")

measured = pytest.mark.skipif(
    not TORCH.startswith("2.13."), reason="the figures are those of torch 2.13"
)


def options(name, *values):
    """The option, repeated."""
    return [word for value in values for word in (name, value)]


def a_schedule(folder, name, torch):
    """A file with a schedule that no torch has."""
    step = ["A", "does something else"]
    saved = {"scenario": "trace-call", "cure": CONTROL, "torch": torch, "steps": [step]}
    (folder / name).write_text(json.dumps({**saved, "failure": "none"}))
    return folder / name


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Every run that is looked at below, by name: (exit status, lines); torch imported once."""
    folder = tmp_path_factory.mktemp("explore")
    saved, cures = folder / "bad.json", options("--cure", NO_OP, HOLDING)
    runs = {
        "search": [*cures, "--save", saved, *options("--scenario", *SCENARIOS[:-1])],
        "longest": ["--cure", HOLDING, "--scenario", SCENARIOS[-1]],
        "replay": ["--json", "--replay", saved],
        "other points": ["--replay", a_schedule(folder, "points.json", TORCH)],
        "other torch": ["--replay", a_schedule(folder, "torch.json", "1.0")],
        "limit": ["--scenario", "trace-module", "--cure", CONTROL, "--limit", "1"],
        "no schedule": ["--replay", __file__],
        "no cure of that name": ["--cure", "prayer"],
        "nothing at once": ["--at-once", "0"],
    }
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("forked.py"))]
    command += [shlex.join(map(str, [REPRO / "explore.py", *run])) for run in runs.values()]
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(said) == len(runs), ended.stderr
    return {
        name: (one["status"], one["said"].splitlines())
        for name, one in zip(runs, said, strict=True)
    }


def line_of(programs, name):
    """The JSON line of a run, checked against its exit status."""
    status, lines = programs[name]
    line = json.loads(lines[-1])
    assert status == EXIT_CODES[line["outcome"]], line
    return line


@pytest.fixture
def rows(programs):
    """The rows of both searches, by scenario and cure."""
    lines = [*line_of(programs, "search")["rows"], *line_of(programs, "longest")["rows"]]
    return {(row["scenario"], row["cure"]): row for row in lines}


def test_the_form(programs, rows):
    keys = {"outcome", "reason", "torch", "rows", "saved", "seconds"}
    assert set(line_of(programs, "search")) == keys
    cures = (CONTROL, NO_OP, HOLDING)
    tried = [(scenario, cure) for scenario in SCENARIOS for cure in cures]
    assert list(rows) == [one for one in tried if one != (SCENARIOS[-1], NO_OP)]
    for row in rows.values():
        assert set(row) == ROW_KEYS
        assert row["outcome"] in EXIT_CODES
        assert row["complete"] or row["outcome"] != "absent"
        assert bool(row["bad"]) == bool(row["schedule"])
        if row["schedule"]:
            assert {thread for thread, _ in row["schedule"]["steps"]} <= set(row["roles"])
            assert row["schedule"]["failure"]
    assert max(map(len, programs["search"][1][:-1])) <= 100


@measured
def test_with_no_cure_every_scenario_has_schedules_that_fail(programs, rows):
    bare = [rows[scenario, CONTROL] for scenario in SCENARIOS]
    assert {row["outcome"] for row in bare} == {"reproduced"}, bare
    assert all(row["complete"] for row in bare), bare
    # B's one point at any of A's seventeen; it fails from "set" up to "restored".
    assert (bare[0]["schedules"], bare[0]["bad"]) == (18, 14)
    assert line_of(programs, "search")["outcome"] == "reproduced"


@measured
def test_no_schedule_fails_with_what_is_shipped(rows):
    held = [rows[scenario, HOLDING] for scenario in SCENARIOS]
    assert all((row["outcome"], row["bad_set"]) == ("absent", "none") for row in held), held
    assert all(row["complete"] and not row["unclear"] for row in held), held
    assert all(row["schedules"] > 1 for row in held), held


@measured
def test_what_is_no_cure_fails_in_the_same_schedules(rows):
    """Except beside an eager operator: that one writes the flag where the cure intercepts it."""
    assert [rows[scenario, NO_OP]["bad_set"] for scenario in SCENARIOS[:-1]] == [
        *("the same", "the same"),
        "none",
    ]


@measured
def test_the_simplest_failure_is_shown_in_columns(programs):
    text = programs["search"][1]
    start = next(n for n, line in enumerate(text) if line.startswith("The simplest that fails"))
    header, _, *lines = text[start + 2 :]
    column = header.index("B calls")
    assert [line[column:] for line in lines[:4]] == ["", "", "reads the tracing flag", ""]
    assert [bool(line[5:column].strip()) for line in lines[:4]] == [True, True, False, True]
    assert any(line.startswith("=> B: RuntimeError in eval_frame.py") for line in lines)


@measured
def test_a_saved_schedule_fails_again(programs):
    line = line_of(programs, "replay")
    assert (line["outcome"], line["scenario"]) == ("reproduced", "trace-call")
    assert line["reason"].startswith("B: RuntimeError in eval_frame.py")
    assert len(programs["replay"][1]) == 1  # --json


@pytest.mark.parametrize("name", ["other points", "other torch"])
def test_a_schedule_that_cannot_be_followed_cannot_be_told(programs, name):
    assert line_of(programs, name)["outcome"] == "cannot tell"


def test_a_search_that_hits_its_limit_is_never_clean(programs):
    line = line_of(programs, "limit")
    assert line["outcome"] == "cannot tell"
    assert not line["rows"][0]["complete"]
    assert any("not exhaustive" in text for text in programs["limit"][1])


@pytest.mark.parametrize("name", ["no schedule", "no cure of that name", "nothing at once"])
def test_a_usage_error_is_exit_code_2(programs, name):
    assert programs[name][0] == 2
