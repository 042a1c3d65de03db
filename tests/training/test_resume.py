"""Stopping, saving and resuming: the same bits as the run that was never interrupted."""

import shutil
from pathlib import Path

import pytest

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


def test_the_saved_config_repeats_the_run(options, losses, tmp_path):
    assert train(TrainConfig.from_dict(options)) == 0
    first = losses()
    saved = TrainConfig.from_toml(Path(options["run"]["output-dir"]) / "run.toml").to_dict()
    saved["run"]["output-dir"] = options["run"]["output-dir"] = str(tmp_path / "again")
    assert train(TrainConfig.from_dict(saved)) == 0
    assert losses() == first
