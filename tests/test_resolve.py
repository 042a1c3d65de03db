"""Choices that are made from the target and the machine, and every refusal."""

import importlib.util
import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from dflash import resolve
from dflash.errors import ConfigError, MissingExtraError, ModelError
from dflash.resolve import check_devices, check_loggers, compute_dtype, drafter_shape


@pytest.fixture
def info(caplog):
    caplog.set_level(logging.INFO, "dflash")
    return caplog


@pytest.fixture
def target_with(tmp_path, tiny_target_dir):
    """A function that makes a directory with the tiny target's config and tokenizer, changed."""

    def make(mask_token="<|mask|>", **changes):
        directory = tmp_path / "target"
        directory.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_target_dir / name, directory)
        config = json.loads((tiny_target_dir / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))
        tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
        tokenizer["mask_token"] = mask_token
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return {"target-model": str(directory)}

    return make


@pytest.mark.parametrize(
    ("devices", "option"),
    [
        ({"target-gpus": "1", "drafter-gpus": "0"}, "--target-gpus"),
        ({"target-gpus": "0", "drafter-gpus": "cpu,7"}, "--drafter-gpus"),
    ],
)
def test_a_device_that_is_not_there_is_refused(train_config, monkeypatch, devices, option):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"which has 1 CUDA device\(s\), got cuda:[17]") as caught:
        check_devices(train_config(devices=devices))
    assert caught.value.option == option
    assert "nvidia-smi" in caught.value.remedy


def test_devices_that_are_there_pass(train_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(train_config(devices={"target-gpus": "0,0", "drafter-gpus": "1,cpu"}))


def test_the_cpu_needs_no_gpu(train_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_devices(train_config())


@pytest.mark.parametrize(
    ("package", "options"),
    [("wandb", {"wandb-project": "name"}), ("tensorboard", {"tensorboard": True})],
)
def test_a_logger_that_is_not_installed_is_refused(train_config, monkeypatch, package, options):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"'{package}', which is not installed") as caught:
        check_loggers(train_config(logging=options))
    assert f"pip install 'dflash-diag[{package}]'" in caught.value.remedy
    check_loggers(train_config())  # nobody asked

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin="somewhere")
    )
    check_loggers(train_config(logging=options))


@pytest.mark.parametrize(
    ("asked", "devices", "capability", "dtype", "reason"),
    [
        ("bfloat16", "cpu", None, torch.bfloat16, "bfloat16, as asked"),
        ("float32", "0", (9, 0), torch.float32, "float32, as asked"),
        ("auto", "cpu", None, torch.float32, "float32, a stage runs on the CPU"),
        ("auto", "0", (9, 0), torch.bfloat16, "bfloat16, compute capability 9.0"),
        ("auto", "0", (8, 0), torch.bfloat16, "bfloat16, compute capability 8.0"),
        ("auto", "0", (7, 5), torch.float32, "float32, compute capability 7.5 is below 8.0"),
    ],
)
def test_the_dtype_is_chosen_with_a_reason(
    train_config, monkeypatch, info, asked, devices, capability, dtype, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    both = {"target-gpus": devices, "drafter-gpus": devices}
    assert compute_dtype(train_config(model={"dtype": asked}, devices=both)) == dtype
    assert f"dtype: {reason}" in info.text


def test_one_old_gpu_decides_for_all(train_config, monkeypatch):
    capability = {"cuda:0": (9, 0), "cuda:1": (7, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.get)
    devices = {"target-gpus": "0", "drafter-gpus": "0,1"}
    assert compute_dtype(train_config(devices=devices)) == torch.float32


def test_linear_attention_without_its_kernels_is_warned_of(
    train_config, tmp_path, hybrid_model, monkeypatch, caplog
):
    hybrid_model.config.save_pretrained(tmp_path)
    model = {"target-model": str(tmp_path), "mask-token-id": 5, "target-layer-ids": "1,2"}

    def said(device, *installed):
        monkeypatch.setattr(resolve, "is_installed", lambda package: package in installed)
        caplog.clear()
        drafter_shape(
            train_config(model=model, devices={"target-gpus": device, "drafter-gpus": device})
        )
        return caplog.text

    text = said("0", "causal_conv1d")
    assert "3 of the target's 4 layers are linear attention" in text
    assert "without its kernels: pip install flash-linear-attention\n" in text
    assert "pip install" not in said("0", "causal_conv1d", "fla")
    assert "pip install" not in said("cpu")


def test_the_shape_follows_the_target(train_config, tiny_tokenizer, info):
    shape = drafter_shape(train_config(model={"sliding-window": 32}))
    assert (shape.num_layers, shape.block_size, shape.sliding_window) == (2, 4, 32)
    assert (shape.target_layer_ids, shape.num_target_layers) == ((1, 3), 6)
    assert shape.mask_token_id == tiny_tokenizer.convert_tokens_to_ids("<|mask|>")
    assert f"mask token: {shape.mask_token_id}, the tokenizer's '<|mask|>'" in info.text


def test_the_mask_token_that_was_asked_for_is_taken(train_config, info):
    assert drafter_shape(train_config(model={"mask-token-id": 0})).mask_token_id == 0
    assert "mask token: 0, as asked" in info.text


def test_a_tokenizer_without_a_mask_token_needs_the_option(train_config, target_with):
    config = train_config(model=target_with(mask_token=None))
    with pytest.raises(ConfigError, match="has no mask token") as caught:
        drafter_shape(config)
    assert caught.value.option == "--mask-token-id"


def test_a_mask_token_outside_the_vocabulary_is_refused(train_config):
    with pytest.raises(ConfigError, match=r"--mask-token-id .*size \(2048\), got 2048"):
        drafter_shape(train_config(model={"mask-token-id": 2048}))


@pytest.mark.parametrize("options", [{"target-layer-ids": "1,6"}, {"num-draft-layers": 9}])
def test_layers_that_the_target_lacks_are_refused(train_config, options):
    with pytest.raises(ConfigError, match="0 to 5") as caught:
        drafter_shape(train_config(model=options))
    assert caught.value.option == "--target-layer-ids"


def test_more_tokens_than_the_target_has_positions_are_warned_of(train_config, caplog):
    drafter_shape(train_config())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    drafter_shape(train_config(data={"max-seq-len": 1025, "token-budget": 2000}))
    assert "--max-seq-len 1025 is past the target's 1024 positions" in caplog.text


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(("rope", "steady"), [(None, 64), (DYNAMIC, 1024)])
def test_texts_in_which_the_rotary_embedding_changes_are_refused(
    train_config, target_with, longrope, rope, steady
):
    model = target_with(rope_parameters=rope or longrope(32))
    drafter_shape(train_config(model=model, data={"max-seq-len": steady, "token-budget": 4000}))
    with pytest.raises(ConfigError, match=f"--max-seq-len must be at most {steady} for this") as no:
        drafter_shape(
            train_config(model=model, data={"max-seq-len": steady + 1, "token-budget": 4000})
        )
    assert no.value.remedy == f"Type --max-seq-len {steady}."


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_soft_labels_need_a_bare_lm_head(train_config, target_with, name):
    model = target_with(**{name: 30.0})
    with pytest.raises(ConfigError, match=f"{name}.*, got 30") as caught:
        drafter_shape(train_config(model=model, objective={"use-soft-labels": True}))
    assert caught.value.option == "--use-soft-labels"
    drafter_shape(train_config(model=model))  # hard labels do


def test_a_target_that_is_not_there_is_refused(train_config, tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json there"):
        drafter_shape(train_config(model={"target-model": str(tmp_path)}))


def test_a_config_of_an_unknown_kind_is_refused(train_config, target_with):
    with pytest.raises(ModelError, match=r"--target-model .*unheard_of"):
        drafter_shape(train_config(model=target_with(model_type="unheard_of")))
