"""A drafter really learns; a mask that leaks looks better and is worse."""

from pathlib import Path

import pytest
import torch

from dflash import attention
from dflash.checkpoint import load_model
from dflash.config import TrainConfig
from dflash.data.completions import Completions
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
    """Train; returns the drafter and the mean loss of the first and the last three steps."""
    assert train(TrainConfig.from_dict(options)) == 0
    by_step = list(losses().values())
    drafter = load_model(max(Path(options["run"]["output-dir"]).glob("step-*")))
    return drafter, sum(by_step[:3]) / 3, sum(by_step[-3:]) / 3


def test_learning_and_the_leaking_control(options, losses, completions, tmp_path, monkeypatch):
    options["optimizer"].update({"epochs": 10, "lr": 4e-3})
    options["objective"]["max-anchors"] = 24
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    drafter, first_loss, last_loss = trained(options, losses)
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
        leaking, _, leaking_loss = trained(options, losses)
    tau_leaking = held_out_tau(leaking, completions / "heldout", target)

    print(f"loss {first_loss:.2f} -> {last_loss:.2f}, leaking {leaking_loss:.2f}; held-out tau:")
    print(f"untrained {tau_untrained:.2f}, trained {tau:.2f}, leaking {tau_leaking:.2f}")
    assert last_loss < 0.5 * first_loss
    assert tau > tau_untrained + 0.4
    assert leaking_loss < last_loss
    assert tau_leaking < tau - 0.2


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
