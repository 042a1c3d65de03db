"""A drafter really learns; a mask that leaks looks better and is worse."""

import math
from pathlib import Path

import pytest
import torch

from dflash import attention
from dflash.checkpoint import load_model
from dflash.config import TrainConfig
from dflash.data.completions import Completion, Completions, write_completions
from dflash.decode import acceptance_length, replay
from dflash.drafter import build_drafter
from dflash.target import load_target
from dflash.trainer import train


def held_out_tau(drafter, directory: Path, target_dir: str) -> float:
    ids = drafter.config.target_layer_ids
    target = load_target(target_dir, ids, torch.float32, trust_remote_code=False)
    data = Completions(directory)
    rows = [data.completion(row) for row in range(len(data))]
    return acceptance_length([replay(target, drafter, target.head, row) for row in rows])


def trained(options, losses):
    """Train; returns the drafter and the mean loss of the last ten steps."""
    assert train(TrainConfig.from_dict(options)) == 0
    by_step = list(losses().values())
    drafter = load_model(max(Path(options["run"]["output-dir"]).glob("step-*")))
    return drafter, sum(by_step[-10:]) / 10


def test_learning_and_the_leaking_control(options, losses, completions, tmp_path, monkeypatch):
    options["optimizer"].update({"epochs": 12, "lr": 6e-3})
    # Every supervised token an anchor: then every label stands in some other block's slot 0.
    options["objective"]["max-anchors"] = 64
    options["data"]["max-batch-size"] = 2
    options["logging"]["log-interval"] = 100
    drafter, loss = trained(options, losses)
    untrained = build_drafter(drafter.config, seed=0, device=torch.device("cpu"))
    target = options["model"]["target-model"]
    tau = held_out_tau(drafter, completions / "heldout", target)
    tau_untrained = held_out_tau(untrained, completions / "heldout", target)

    def everything(anchor_N, block_size, window):
        size = len(anchor_N) * block_size
        return torch.ones(size, size, dtype=torch.bool)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "_own_block_mask", everything)
        options["run"]["output-dir"] = str(tmp_path / "leaking")
        leaking, leaking_loss = trained(options, losses)
    tau_leaking = held_out_tau(leaking, completions / "heldout", target)

    print(f"loss {loss:.2f}, leaking {leaking_loss:.2f}; held-out tau: untrained")
    print(f"{tau_untrained:.2f}, trained {tau:.2f}, leaking {tau_leaking:.2f}")
    guessing = math.log(drafter.config.vocab_size)
    assert loss < 0.3 * guessing
    assert tau > tau_untrained + 0.8
    assert leaking_loss < loss
    assert tau_leaking < tau - 0.8


@pytest.mark.parametrize("soft", [False, True])
def test_two_drafters_equal_one_that_accumulates(options, losses, tmp_path, soft):
    if soft:
        options["objective"].update({"use-soft-labels": True, "cap-lambda": 0.1})
    options["optimizer"]["grad-accum"] = 2
    assert train(TrainConfig.from_dict(options)) == 0
    one = losses()
    options["optimizer"]["grad-accum"] = 1
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    options["run"]["output-dir"] = str(tmp_path / "two")
    assert train(TrainConfig.from_dict(options)) == 0
    two = losses()
    assert list(one) == list(two)
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-4)


def test_a_run_repeats_with_any_number_of_threads(options, losses, tmp_path):
    options["objective"].update({"noise-start": 0.1, "noise-type": "gaussian"})
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    assert train(TrainConfig.from_dict(options)) == 0
    few = losses()
    options["data"]["num-prefetch-threads"] = 1
    options["devices"]["target-gpus"] = "cpu,cpu,cpu"
    options["run"]["output-dir"] = str(tmp_path / "other")
    assert train(TrainConfig.from_dict(options)) == 0
    assert few == losses()


def test_a_hybrid_target_trains(options, losses, hybrid_model, tmp_path):
    hybrid_model.save_pretrained(tmp_path / "hybrid")
    rows = [
        Completion(str(n), "random", [(7 * n + i) % 63 for i in range(20)], [0] * 4 + [1] * 16)
        for n in range(8)
    ]
    write_completions(tmp_path / "data", rows, {})
    options["model"].update({"target-model": str(tmp_path / "hybrid"), "mask-token-id": 63})
    options["model"]["target-layer-ids"] = [0, 2]
    options["data"]["data-dir"] = str(tmp_path / "data")
    options["objective"].update({"use-soft-labels": True, "cap-lambda": 0.1, "noise-start": 0.05})
    options["optimizer"]["epochs"] = 3
    assert train(TrainConfig.from_dict(options)) == 0
    assert len(losses()) == 3
