"""Stopping, saving and resuming: the same bits as the run that was never interrupted."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dflash.cli import main
from dflash.config import TrainConfig
from dflash.trainer import train


def set_threads(options, targets: int, drafters: int) -> None:
    options["devices"] = {
        "target-gpus": ["cpu"] * targets,
        "drafter-gpus": ["cpu"] * drafters,
    }
    options["optimizer"]["epochs"] = drafters


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 2)])
def test_resume_is_bitwise(options, losses, targets, drafters):
    set_threads(options, targets, drafters)
    options["objective"].update({"noise-start": 0.1, "use-soft-labels": True, "cap-lambda": 0.1})
    options["run"]["save-interval"] = 3
    assert train(TrainConfig.from_dict(options)) == 0
    whole = losses()
    run = Path(options["run"]["output-dir"])
    final = max(run.glob("step-*"))
    weights = (final / "training.safetensors").read_bytes()
    assert len(whole) == 6
    shutil.rmtree(final)
    (run / "metrics.jsonl").unlink()

    options["run"]["resume"] = "auto"
    assert train(TrainConfig.from_dict(options)) == 0
    assert losses() == {step: loss for step, loss in whole.items() if step > 3}
    assert (final / "training.safetensors").read_bytes() == weights


def test_a_finished_run_has_nothing_to_resume(options):
    assert train(TrainConfig.from_dict(options)) == 0
    options["run"]["resume"] = "auto"
    assert train(TrainConfig.from_dict(options)) == 0
    assert "nothing to do" in (Path(options["run"]["output-dir"]) / "train.log").read_text()


def test_a_run_is_not_mixed_up_with_another(options):
    assert train(TrainConfig.from_dict(options)) == 0
    assert train(TrainConfig.from_dict(options)) == 1
    options["run"]["resume"] = "auto"
    options["optimizer"]["lr"] = 1e-5
    assert train(TrainConfig.from_dict(options)) == 1
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert "already holds a run" in log
    assert "--lr 0.002 -> 1e-05" in log


def stopped_halfway(options, losses):
    """Train six steps, forget the last checkpoint; returns the losses and the run's directory."""
    options["run"]["save-interval"] = 2
    assert train(TrainConfig.from_dict(options)) == 0
    whole, run = losses(), Path(options["run"]["output-dir"])
    shutil.rmtree(max(run.glob("step-*")))
    options["run"]["resume"] = "auto"
    return whole, run


def log_of(run: Path) -> str:
    return (run / "train.log").read_text()


def test_another_number_of_threads_and_drafters_goes_on_where_it_was(options, losses):
    options["optimizer"]["grad-accum"] = 2
    options["optimizer"]["epochs"] = 2
    whole, run = stopped_halfway(options, losses)
    options["optimizer"]["grad-accum"] = 1
    options["devices"] = {"target-gpus": "cpu,cpu,cpu", "drafter-gpus": "cpu,cpu"}
    options["data"]["num-prefetch-threads"] = 1
    assert train(TrainConfig.from_dict(options)) == 0
    assert "resuming with --drafter-gpus ['cpu'] -> ['cpu', 'cpu']" in log_of(run)
    assert list(losses()) == list(whole) == [1, 2, 3, 4, 5, 6]
    assert list(losses().values()) == pytest.approx(list(whole.values()), rel=1e-4)


def test_a_step_of_another_size_is_refused(options, losses):
    _, run = stopped_halfway(options, losses)
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    assert train(TrainConfig.from_dict(options)) == 1
    said = "drafters x --grad-accum must be 1, as before, got 2"
    assert said in log_of(run)
    assert "step-00000004 stands at micro-batch 4, this run would go on at 8" in log_of(run)


def test_data_and_target_may_move_but_not_change(options, losses, completions, tmp_path):
    whole, run = stopped_halfway(options, losses)
    data, target = Path(options["data"]["data-dir"]), Path(options["model"]["target-model"])
    options["data"]["data-dir"] = str(shutil.copytree(data, tmp_path / "moved-data"))
    options["model"]["target-model"] = str(shutil.copytree(target, tmp_path / "moved-target"))
    assert train(TrainConfig.from_dict(options)) == 0
    assert losses() == whole

    shutil.rmtree(max(run.glob("step-*")))
    options["data"]["data-dir"] = str(completions / "heldout")
    assert train(TrainConfig.from_dict(options)) == 1
    assert "was trained with another --data-dir: its content has changed" in log_of(run)
    assert losses() == whole


@pytest.fixture
def own_target(options, tmp_path, tiny_target_dir):
    """A copy of the target that may be changed, named by the options."""
    copy = tmp_path / "target"
    shutil.copytree(tiny_target_dir, copy)
    options["model"]["target-model"] = str(copy)
    return copy


def test_a_target_of_other_weights_is_refused(options, losses, own_target):
    _, run = stopped_halfway(options, losses)
    path = own_target / "model.safetensors"
    size = path.stat().st_size
    save_file({name: 1.5 * x for name, x in load_file(path).items()}, path, {"format": "pt"})
    assert path.stat().st_size == size
    assert train(TrainConfig.from_dict(options)) == 1
    assert "was trained with another --target-model: its content has changed" in log_of(run)


def test_a_target_that_makes_another_drafter_is_refused(options, losses, own_target):
    _, run = stopped_halfway(options, losses)
    path = own_target / "tokenizer_config.json"
    about = json.loads(path.read_text())
    assert about["mask_token"] == "<|mask|>"
    path.write_text(json.dumps(about | {"mask_token": "<|endoftext|>"}))
    assert train(TrainConfig.from_dict(options)) == 1
    assert "another drafter than this run would train: mask_token_id 3 -> 0" in log_of(run)


def test_what_a_run_started_from_may_be_gone(options, losses, tmp_path):
    assert train(TrainConfig.from_dict(options)) == 0
    run = Path(options["run"]["output-dir"])
    run.rename(tmp_path / "first")
    options["model"]["init-from"] = str(tmp_path / "first")
    whole, run = stopped_halfway(options, losses)
    shutil.rmtree(tmp_path / "first")
    TrainConfig.from_dict(options).save_toml(tmp_path / "run.toml")
    result = CliRunner().invoke(main, ["train", "--config", str(tmp_path / "run.toml")])
    assert result.exit_code == 0, result.output
    assert losses() == whole


@pytest.mark.parametrize("damage", ["truncated", "empty", "no state"])
def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(options, losses, damage):
    whole, run = stopped_halfway(options, losses)
    newest = max(run.glob("step-*"))
    tensors = newest / "training.safetensors"
    if damage == "no state":
        (newest / "state.json").unlink()
    else:
        tensors.write_bytes(tensors.read_bytes()[:-1] if damage == "truncated" else b"")
    assert train(TrainConfig.from_dict(options)) == 0
    assert re.search(rf"WARNING .*{newest.name}.*; falling back to the checkpoint", log_of(run))
    assert f"resuming from {run}/step-00000002" in log_of(run)
    assert losses() == whole


def test_a_run_without_a_readable_checkpoint_does_not_start_over(options, losses):
    _, run = stopped_halfway(options, losses)
    for path in run.glob("step-*/state.json"):
        path.write_text("{")
    assert train(TrainConfig.from_dict(options)) == 1
    assert "none of its checkpoints can be read" in log_of(run)


def test_the_saved_config_repeats_the_run(options, losses, tmp_path):
    assert train(TrainConfig.from_dict(options)) == 0
    first = losses()
    saved = TrainConfig.from_toml(Path(options["run"]["output-dir"]) / "run.toml").to_dict()
    saved["run"]["output-dir"] = options["run"]["output-dir"] = str(tmp_path / "again")
    assert train(TrainConfig.from_dict(saved)) == 0
    assert losses() == first
