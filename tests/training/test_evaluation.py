"""Evaluation during training measures and changes nothing; training goes on from public weights."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dflash import trainer
from dflash.checkpoint import load_model
from dflash.cli import main
from dflash.config import TrainConfig
from dflash.data.completions import Completions
from dflash.decode import acceptance_length, replay
from dflash.errors import ConfigError, DataError, Exit
from dflash.heldout import HeldOut, held_out_documents
from dflash.target import Target, load_target
from dflash.trainer import train


@pytest.fixture
def rows(options):
    """A function that reads metrics.jsonl."""

    def read():
        path = Path(options["run"]["output-dir"]) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read


@pytest.fixture
def evaluating(options, completions):
    """The same run with two replicas that check each other every step, evaluated every 4 steps."""
    options["devices"] = {"target-gpus": ["cpu"] * 2, "drafter-gpus": ["cpu"] * 2}
    options["optimizer"]["epochs"] = 2
    options["run"].update({"replica-check-interval": 1, "save-interval": 3})
    options["evaluation"] = {"eval-every": 4, "eval-data": str(completions / "heldout")}
    return options


def weights(options):
    run = Path(options["run"]["output-dir"])
    return (max(run.glob("step-*")) / "training.safetensors").read_bytes()


def test_evaluation_changes_nothing_and_agrees_with_a_replay_afterwards(
    evaluating, rows, completions, tiny_model
):
    assert train(TrainConfig.from_dict(evaluating)) == 0
    run = Path(evaluating["run"]["output-dir"])
    measured = {row["step"]: row["evaluation"] for row in rows() if row["evaluation"]}
    assert list(measured) == [4, 6]
    assert "step 4: held-out tau" in (run / "train.log").read_text()
    assert measured[6]["documents"] == 12
    assert measured[6]["seconds"] > 0

    drafter = load_model(max(run.glob("step-*")))
    target = Target(tiny_model, drafter.config.target_layer_ids)
    stored = Completions(completions / "heldout")
    done = [stored.completion(row) for row in range(len(stored))]
    taus = acceptance_length([replay(target, drafter, target.head, one) for one in done])
    assert measured[6]["tau"] == pytest.approx(taus)

    losses, expected = [row["loss"] for row in rows()], weights(evaluating)
    shutil.rmtree(run)
    del evaluating["evaluation"]
    assert train(TrainConfig.from_dict(evaluating)) == 0
    assert [row["loss"] for row in rows()] == losses
    assert weights(evaluating) == expected


def test_an_evaluated_run_resumes_bitwise(evaluating, rows):
    assert train(TrainConfig.from_dict(evaluating)) == 0
    run = Path(evaluating["run"]["output-dir"])
    whole, expected = rows(), weights(evaluating)
    shutil.rmtree(max(run.glob("step-*")))
    (run / "metrics.jsonl").unlink()
    evaluating["run"]["resume"] = "auto"
    assert train(TrainConfig.from_dict(evaluating)) == 0
    assert weights(evaluating) == expected
    resumed = rows()
    assert [row["step"] for row in resumed] == [4, 5, 6]
    for before, after in zip(whole[3:], resumed, strict=True):
        assert before["loss"] == after["loss"]
        assert before["evaluation"].get("tau") == after["evaluation"].get("tau")


def test_rows_are_limited_and_cut(evaluating):
    evaluating["evaluation"]["eval-rows"] = 5
    evaluating["data"]["max-seq-len"] = 30
    documents = held_out_documents(TrainConfig.from_dict(evaluating), 2048)
    assert len(documents) == 5
    assert all(len(one.input_ids) == len(one.loss_mask) <= 30 for one in documents)
    evaluating["data"]["max-seq-len"] = 5
    with pytest.raises(DataError, match="none of 12 rows has two supervised tokens"):
        held_out_documents(TrainConfig.from_dict(evaluating), 2048)


def test_held_out_rows_of_another_tokenizer_are_refused_before_anything_is_loaded(
    evaluating, tmp_path, monkeypatch
):
    foreign = tmp_path / "foreign"
    shutil.copytree(evaluating["evaluation"]["eval-data"], foreign)
    about = json.loads((foreign / "meta.json").read_text())
    (foreign / "meta.json").write_text(json.dumps(about | {"tokenizer_sha256": "0" * 64}))
    evaluating["evaluation"]["eval-data"] = str(foreign)
    monkeypatch.setattr(trainer, "load_targets", None)
    assert train(TrainConfig.from_dict(evaluating)) == 1
    log = (Path(evaluating["run"]["output-dir"]) / "train.log").read_text()
    assert "its token ids are another tokenizer's" in log


@pytest.mark.parametrize("given", [{"eval-every": 4}, {"eval-data": "somewhere"}])
def test_evaluating_needs_both_options(options, given):
    options["evaluation"] = given
    with pytest.raises(ConfigError, match="--eval-every and --eval-data must be given together"):
        TrainConfig.from_dict(options)


def test_an_evaluation_as_long_as_others_wait_is_warned_of(evaluating, monkeypatch):
    slow = {"tau": 1.0, "documents": 1, "seconds": 301.0}
    monkeypatch.setattr(HeldOut, "measure", lambda *models: slow)
    assert train(TrainConfig.from_dict(evaluating)) == 0
    log = (Path(evaluating["run"]["output-dir"]) / "train.log").read_text()
    assert log.count("lower --eval-rows, or raise --stall-timeout-s (600)") == 2


def first_loss(options, rows, name, **model):
    options["run"]["output-dir"] = str(Path(options["run"]["output-dir"]).with_name(name))
    options["model"].update(model)
    assert train(TrainConfig.from_dict(options)) == 0
    return rows()[0]["loss"]


@pytest.mark.parametrize("layout", [None, "z-lab", "speculators"])
def test_training_starts_from_a_checkpoint_of_any_layout(options, rows, tmp_path, layout):
    fresh = first_loss(options, rows, "first")
    trained = rows()[-1]["loss"]
    source = tmp_path / "first"
    if layout:
        source = tmp_path / "exported"
        arguments = [str(tmp_path / "first"), str(source), "--format", layout]
        assert CliRunner().invoke(main, ["export", *arguments]).exit_code == Exit.OK
    goes_on = first_loss(options, rows, "second", **{"init-from": str(source)})
    assert goes_on < (fresh + trained) / 2
    log = (tmp_path / "second" / "train.log").read_text()
    assert "starting from the weights of" in log
    # Another run of the same kind starts at the very same loss.
    assert first_loss(options, rows, "third") == goes_on


def test_a_resumed_run_keeps_its_own_weights(options, rows, tmp_path):
    first_loss(options, rows, "first")
    options["run"]["save-interval"] = 3
    first_loss(options, rows, "second", **{"init-from": str(tmp_path / "first")})
    run = tmp_path / "second"
    expected = weights(options)
    shutil.rmtree(max(run.glob("step-*")))
    options["run"]["resume"] = "auto"
    assert train(TrainConfig.from_dict(options)) == 0
    assert weights(options) == expected


def test_options_that_contradict_the_checkpoint_are_named(options, rows, tmp_path, caplog):
    first_loss(options, rows, "first")
    options["model"].update({"init-from": str(tmp_path / "first"), "block-size": 8})
    options["model"].update({"num-draft-layers": 1, "mask-token-id": 4})
    options["run"]["output-dir"] = str(tmp_path / "second")
    with caplog.at_level(logging.ERROR):
        assert train(TrainConfig.from_dict(options)) == Exit.USAGE
    log = (tmp_path / "second" / "train.log").read_text()
    assert "--init-from has a drafter of another shape" in log
    assert "--num-draft-layers 2 --block-size 4 --mask-token-id 3" in log


def test_a_checkpoint_for_another_target_is_named(options, rows, tmp_path, tiny_target_dir):
    first_loss(options, rows, "first")
    other = tmp_path / "other"
    shutil.copytree(tiny_target_dir, other)
    public = json.loads((other / "config.json").read_text())
    changed = {**public, "num_hidden_layers": 5, "layer_types": public["layer_types"][:5]}
    (other / "config.json").write_text(json.dumps(changed))
    options["model"].update({"target-model": str(other), "init-from": str(tmp_path / "first")})
    options["run"]["output-dir"] = str(tmp_path / "second")
    assert train(TrainConfig.from_dict(options)) == Exit.FAILED
    log = (tmp_path / "second" / "train.log").read_text()
    assert "made for another target: its number of target layers is 6, the target's 5" in log


def test_a_target_of_its_own_shares_the_weights(tiny_target_dir):
    """Hooks of its own: two threads may run them at the same time."""
    loaded = load_target(str(tiny_target_dir), (1, 3), torch.float32, trust_remote_code=False)
    cpu = torch.device("cpu")
    first, extra = loaded.copies([cpu, cpu])
    assert extra.head.embedding_VD.data_ptr() == first.head.embedding_VD.data_ptr()
    assert extra.layers[1] is not first.layers[1]
