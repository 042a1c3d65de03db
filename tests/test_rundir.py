"""The output directory: the log, the description, what may be resumed, and the sinks."""

import io
import json
import logging
import re
import threading

import pytest
from rich.console import Console
from safetensors.torch import save_file

from dflash.checkpoint import FILES, FORMAT
from dflash.config import TrainConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.manifest import collect
from dflash.rundir import RunDirectory, run_directory
from dflash.sinks import BarSink, JsonlSink, LinesSink

log = logging.getLogger("dflash.unit")


@pytest.fixture
def directory(tmp_path, train_config):
    """A function that makes the RunDirectory of a configuration, without logging."""

    def make(terminal=False, **sections):
        (tmp_path / "out").mkdir(exist_ok=True)
        console = Console(file=io.StringIO(), force_terminal=terminal)
        return RunDirectory(tmp_path / "out", train_config(**sections), console)

    return make


def checkpoint_at(directory, step, config=None):
    """A directory that looks like a complete checkpoint."""
    path = directory.path / f"step-{step:08d}"
    path.mkdir()
    for name in FILES:
        save_file({}, path / name)
    progress = {"step": step, "next_batch": step}
    state = {
        "format": FORMAT,
        "progress": progress,
        "config": config or directory.config.to_dict(),
    }
    (path / "state.json").write_text(json.dumps(state))
    return path


def test_a_directory_is_one_runs_at_a_time(train_config):
    config = train_config()
    with run_directory(config) as directory:
        with (
            pytest.raises(ConfigError, match="must not be another run's that still goes on") as no,
            run_directory(config),
        ):
            raise AssertionError
        assert f"dflash-diag stacks --run {directory.path}" in no.value.remedy
        log.info("goes on")
    with run_directory(config):
        pass
    assert "goes on" in (directory.path / "train.log").read_text()


def test_the_log_goes_to_stderr_and_to_a_file_and_ends_with_the_run(train_config, capsys):
    config = train_config()
    with run_directory(config) as directory:
        log.info("loss [bold]1.5[/bold] %s", "x" * 300)
        thread = threading.Thread(target=log.warning, args=("from elsewhere",), name="target-0")
        thread.start()
        thread.join()
    log.error("too late")

    written = (directory.path / "train.log").read_text()
    assert f"INFO MainThread loss [bold]1.5[/bold] {'x' * 300}\n" in written
    assert "WARNING target-0 from elsewhere\n" in written
    assert "too late" not in written
    captured = capsys.readouterr()
    undated = re.sub(r"^\d{4}-\d\d-\d\d ", "", written, flags=re.MULTILINE)
    assert (captured.err, captured.out) == (undated, "")


def test_what_transformers_warns_of_is_in_the_file_too(train_config):
    theirs = logging.getLogger("transformers.models")
    with run_directory(train_config()) as directory:
        theirs.warning("a slow path")
    theirs.warning("too late")
    written = (directory.path / "train.log").read_text()
    assert "WARNING MainThread a slow path\n" in written
    assert "too late" not in written


def test_a_log_is_appended_to(train_config):
    for text in ("first run", "second run"):
        with run_directory(train_config()) as directory:
            log.info(text)
    written = (directory.path / "train.log").read_text()
    assert written.count("first run") == written.count("second run") == 1


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_directory_that_cannot_be_made_is_refused(tmp_path, train_config, name):
    (tmp_path / "file").touch()
    config = train_config(run={"output-dir": str(tmp_path / name)})
    refused = pytest.raises(ConfigError, match="--output-dir must be a writable directory")
    with refused as caught, run_directory(config):
        pass
    assert "mkdir -p" in caught.value.remedy


def test_the_description_repeats_the_run(directory):
    here = directory(data={"seed": 7})
    here.write_description(collect("abc"))
    assert TrainConfig.from_toml(here.path / "run.toml") == here.config
    assert json.loads((here.path / "manifest.json").read_text())["config_hash"] == "abc"


def test_a_fresh_directory_starts_from_nothing(directory):
    assert directory().resume_from() is None
    assert directory(run={"resume": "auto"}).resume_from() is None


def test_a_directory_that_holds_a_run_is_not_mixed_up_with_another(directory):
    here = directory()
    checkpoint_at(here, 5)
    with pytest.raises(CheckpointError, match="already holds a run, at step-00000005") as caught:
        here.resume_from()
    assert "--resume auto" in caught.value.remedy


def test_auto_takes_the_newest_complete_checkpoint(directory):
    here = directory(run={"resume": "auto"})
    checkpoint_at(here, 5)
    newest = checkpoint_at(here, 10)
    (here.path / ".writing-step-00000015").mkdir()
    state = here.resume_from()
    assert (state.directory, state.progress.step) == (newest, 10)


def test_a_path_names_the_checkpoint(directory):
    here = directory()
    older = checkpoint_at(here, 5)
    checkpoint_at(here, 10)
    assert directory(run={"resume": str(older)}).resume_from().progress.step == 5


def test_a_path_without_a_checkpoint_is_refused(directory, tmp_path):
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        directory(run={"resume": str(tmp_path / "nowhere")}).resume_from()


def test_changed_options_are_named(directory):
    checkpoint_at(directory(objective={"gamma": 5.0}), 5)
    changed = directory(
        run={"resume": "auto"},
        objective={"gamma": 7.0, "use-soft-labels": True},
        model={"mask-token-id": 4},
    )
    with pytest.raises(CheckpointError, match="was trained with other options") as caught:
        changed.resume_from()
    for change in (
        "--gamma 5.0 -> 7.0",
        "--use-soft-labels False -> True",
        "--mask-token-id None -> 4",
    ):
        assert change in str(caught.value)
    assert str(caught.value).count("->") == 3


def test_options_that_change_no_result_may_differ(directory):
    checkpoint_at(directory(), 5)
    other = directory(
        run={"resume": "auto", "save-interval": 1, "stop-grace-s": 1.0},
        logging={"log-interval": 3},
        data={"num-prefetch-threads": 9},
    )
    assert other.resume_from().progress.step == 5


@pytest.mark.parametrize(
    ("log_format", "terminal", "shown"),
    [
        ("auto", True, BarSink),
        ("auto", False, LinesSink),
        ("bar", False, BarSink),
        ("lines", True, LinesSink),
    ],
)
def test_a_terminal_gets_a_bar_and_a_file_gets_lines(directory, log_format, terminal, shown):
    here = directory(terminal, logging={"log-format": log_format})
    reporter = here.reporter(0, 10)
    kinds = [type(sink) for sink in reporter._sinks]
    reporter.close()
    assert kinds == [JsonlSink, shown]
    assert (here.path / "metrics.jsonl").is_file()


def test_loggers_are_added_where_asked_for(directory, monkeypatch):
    made = []
    monkeypatch.setattr("dflash.rundir.WandbSink", lambda *args: made.append(args))
    monkeypatch.setattr("dflash.rundir.TensorBoardSink", lambda *args: made.append(args))
    here = directory(
        logging={"wandb-project": "project", "wandb-run-name": "name", "tensorboard": True}
    )
    here.reporter(0, 10)
    assert made == [
        ("project", "name", here.path, here.config.to_dict()),
        (here.path / "tensorboard",),
    ]
