"""`dflash compare`: the first step that differs, what it is in, and the exit codes."""

import json
import shutil

import pytest
from click.testing import CliRunner

from dflash.cli import main
from dflash.manifest import collect

ROW = {
    "epoch": 0,
    "batches": 7,
    "tokens": 100,
    "draft_positions": 40,
    "lr": 1e-3,
    "noise": 0.0,
    "loss": 2.0,
    "ce": 2.0,
    "kl": 0.0,
    "cap": 0.0,
    "grad_norm": 1.0,
    "acceptance_length": 1.5,
    "tokens_per_s": 200.0,
    "elapsed_s": 3.5,
    "seconds": 0.5,
}


@pytest.fixture
def make_run(tmp_path, train_config):
    """A function that writes an output directory: `make_run("a", {3: {"loss": 9}})`."""

    def make(name, changes=None, steps=5, **sections):
        run = tmp_path / name
        run.mkdir()
        train_config(**sections).save_toml(run / "run.toml")
        (run / "manifest.json").write_text(collect("abc").to_json())
        rows = [{**ROW, "step": s, **(changes or {}).get(s, {})} for s in range(1, steps + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run

    return make


def compare(*arguments):
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def test_a_run_equals_itself_however_long_it_took(make_run):
    result = compare(make_run("a"), make_run("b", {1: {"elapsed_s": 9.0, "tokens_per_s": 10.0}}))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "same: 5 steps"
    assert "seconds to the first step: 3 | 8.5" in result.stdout


def test_the_steps_that_both_have_are_compared(make_run):
    result = compare(make_run("a", steps=2), make_run("b", {4: {"loss": 9.0}}))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "same: 2 steps")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({3: {"loss": 2.1, "acceptance_length": 1.6}}, "DIFFERENT from step 3 on, first in loss"),
        ({2: {"batches": 8, "loss": 2.1}}, "DIFFERENT from step 2 on, first in batches"),
        ({5: {"lr": 2e-3}, 4: {"grad_norm": 7.0}}, "DIFFERENT from step 4 on, first in grad_norm"),
        ({4: {"loss": float("nan")}}, "DIFFERENT from step 4 on, first in loss"),
    ],
)
def test_the_first_step_that_differs_is_named_cause_before_effect(make_run, changes, verdict):
    result = compare(make_run("a"), make_run("b", changes))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, verdict)


def test_a_tolerance_is_for_what_is_measured_only(make_run):
    a, b = make_run("a"), make_run("b", {2: {"loss": 2.0001}, 4: {"batches": 8}})
    result = compare(a, b, "--tolerance", "1e-3")
    assert result.exit_code == 1
    assert "DIFFERENT from step 4 on, first in batches" in result.stdout
    assert "largest      loss: 5e-05 relative" in result.stdout


def test_options_that_determine_the_weights_are_named_and_others_are_not(make_run):
    a, b = make_run("a"), make_run("b", objective={"gamma": 5.0}, run={"save-interval": 3})
    result = compare(a, b)
    assert result.exit_code == 1
    assert "option       --gamma: 7 | 5" in result.stdout
    assert "save-interval" not in result.stdout
    assert "DIFFERENT in 1 option(s); the 5 steps agree" in result.stdout


def test_another_environment_is_shown_and_condemns_nothing(make_run):
    a, b = make_run("a"), make_run("b")
    manifest = json.loads((b / "manifest.json").read_text())
    (b / "manifest.json").write_text(json.dumps({**manifest, "torch": "9.9"}))
    result = compare(a, b)
    assert result.exit_code == 0
    assert "| 9.9" in result.stdout


def test_json_has_all_of_it(make_run):
    result = compare(make_run("a"), make_run("b", {3: {"loss": 2.5}}), "--json")
    found = json.loads(result.stdout)
    assert set(found) == {
        *("same", "options", "environment", "steps", "first_step", "at_step", "largest", "speed")
    }
    assert (found["same"], found["steps"], found["first_step"]) == (False, 5, 3)
    assert found["at_step"] == [{"what": "loss", "a": 2.0, "b": 2.5}]


def test_of_a_repeated_step_the_last_counts_and_a_torn_line_does_not(make_run):
    a, b = make_run("a"), make_run("b", {5: {"loss": 9.0}})
    with (b / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**ROW, "step": 5}) + '\n{"step": 6, "lo')
    assert compare(a, b).exit_code == 0


def test_runs_without_a_common_step_are_not_the_same(make_run):
    result = compare(make_run("a", steps=0), make_run("b"))
    assert (result.exit_code, result.stdout) == (1, "DIFFERENT: no step that both have\n")


@pytest.mark.parametrize("name", ["run.toml", "manifest.json", "metrics.jsonl"])
def test_what_is_no_run_is_a_usage_error(make_run, name):
    a, b = make_run("a"), make_run("b")
    (b / name).unlink()
    result = compare(a, b)
    assert result.exit_code == 2
    assert f"no {name}, so not a directory that a run left" in result.stderr
    shutil.rmtree(b)
    assert compare(a, b).exit_code == 2


def test_metrics_of_another_version_are_a_usage_error(make_run):
    a, b = make_run("a"), make_run("b")
    (b / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    result = compare(a, b)
    assert (result.exit_code, "line 1 is not a step's metrics" in result.stderr) == (2, True)
