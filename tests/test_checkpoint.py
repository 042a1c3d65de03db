"""Checkpoints: bit for bit, under public names, and complete as soon as they have their name."""

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoint
from dflash.checkpoint import Checkpoints, Progress, load_model, load_state
from dflash.drafter import build_drafter
from dflash.errors import CheckpointError
from dflash.optim import apply_step, make_optimizer
from dflash.sections import OptimizerConfig

CPU = torch.device("cpu")
CONFIG = {"data": {"seed": 3}}
# What z-lab's, SGLang's and vLLM's readers ask for.
PUBLIC_KEYS = """
    architectures model_type block_size num_target_layers dflash_config hidden_size
    intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    rms_norm_eps max_position_embeddings rope_theta rope_scaling layer_types sliding_window
    use_sliding_window max_window_layers hidden_act attention_bias attention_dropout
    initializer_range tie_word_embeddings use_cache dtype bos_token_id eos_token_id pad_token_id
"""


class Training:
    """A drafter, its optimizer, and steps along random gradients that depend on the step alone."""

    def __init__(self, shape, seed=0, device=CPU):
        self.drafter = build_drafter(shape, seed=seed, device=device)
        self.optimizer = make_optimizer(self.drafter, OptimizerConfig())

    def steps(self, start, stop):
        for step in range(start, stop):
            random = torch.Generator().manual_seed(step)
            gradients = [
                torch.randn(p.shape, generator=random).to(p.device)
                for p in self.drafter.parameters()
            ]
            apply_step(self.drafter, self.optimizer, gradients, lr=1e-2, clip=1.0, step=step)
        return self

    @property
    def weights(self):
        return [p.detach().clone() for p in self.drafter.parameters()]


@pytest.fixture
def trained(drafter_shape):
    return Training(drafter_shape()).steps(0, 3)


def save(directory, training, step=3, keep=0):
    checkpoints = Checkpoints(directory, keep, CONFIG)
    return checkpoints.save(training.drafter, training.optimizer, Progress(step, 2 * step))


def equal(some, others):
    return all(a.equal(b) for a, b in zip(some, others, strict=True))


def test_a_restored_run_goes_on_bit_for_bit(tmp_path, drafter_shape, trained):
    state = load_state(save(tmp_path, trained))
    assert state.progress == Progress(3, 6)
    assert state.config == CONFIG

    resumed = Training(drafter_shape(), seed=1)
    state.restore(resumed.drafter, resumed.optimizer)
    assert equal(resumed.weights, trained.weights)
    assert equal(resumed.steps(3, 6).weights, trained.steps(3, 6).weights)


def test_a_restored_run_holds_no_file_of_its_checkpoint(tmp_path, drafter_shape, trained):
    """A mapped file takes disk space after --keep-checkpoints has deleted it."""
    directory = save(tmp_path, trained)
    resumed = Training(drafter_shape())
    load_state(directory).restore(resumed.drafter, resumed.optimizer)
    gc.collect()
    assert str(directory) not in Path("/proc/self/maps").read_text()


@pytest.mark.gpu
def test_a_restored_run_goes_on_with_the_kernel(tmp_path, drafter_shape):
    cuda = torch.device("cuda")
    trained = Training(drafter_shape(), device=cuda).steps(0, 3)
    state = load_state(save(tmp_path, trained))
    resumed = Training(drafter_shape(), seed=1, device=cuda)
    state.restore(resumed.drafter, resumed.optimizer)
    assert equal(resumed.steps(3, 6).weights, trained.steps(3, 6).weights)


def test_weights_without_moments_would_go_on_otherwise(tmp_path, drafter_shape, trained):
    """The control: what the optimizer knows matters."""
    fresh = Training(drafter_shape())
    fresh.drafter.load_state_dict(trained.drafter.state_dict())
    assert not equal(fresh.steps(3, 6).weights, trained.steps(3, 6).weights)


def test_the_public_weights_are_bfloat16_under_their_names(tmp_path, trained):
    weights = load_file(save(tmp_path, trained) / "model.safetensors")
    assert set(weights) == set(trained.drafter.state_dict())
    assert len(weights) == 11 * 2 + 3
    for name, tensor in trained.drafter.state_dict().items():
        assert weights[name].dtype == torch.bfloat16
        assert weights[name].equal(tensor.bfloat16())


@pytest.mark.parametrize("window", [0, 2048])
def test_the_public_config(tmp_path, drafter_shape, window):
    shape = drafter_shape(num_layers=3, sliding_window=window, eos_token_id=[2, 3])
    directory = save(tmp_path, Training(shape).steps(0, 1))
    config = json.loads((directory / "config.json").read_text())
    assert set(config) == {*PUBLIC_KEYS.split(), "rope_parameters"}
    layer_types = ["sliding_attention" if window else "full_attention"] * 2
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 31, "target_layer_ids": [1, 3], "block_size": 4},
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "layer_types": [*layer_types, "full_attention"],
        "bos_token_id": None,
        "eos_token_id": [2, 3],
    }
    assert {key: config[key] for key in expected} == expected
    assert load_model(directory).config == shape


def test_transformers_reads_the_public_config_as_qwen3(tmp_path, trained):
    from transformers import Qwen3Config

    config = Qwen3Config.from_pretrained(save(tmp_path, trained))
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (16, 8, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.layer_types == ["full_attention"] * 2


def test_a_model_loads_in_float32_where_it_can(tmp_path, trained):
    directory = save(tmp_path, trained)
    exact = load_model(directory)
    assert equal(exact.parameters(), trained.drafter.parameters())
    assert all(p.dtype == torch.float32 for p in exact.parameters())

    (directory / "training.safetensors").unlink()
    rounded = load_model(directory)
    expected = [p.bfloat16().float() for p in trained.drafter.parameters()]
    assert equal(rounded.parameters(), expected)


def test_a_window_that_is_not_used_and_ids_that_are_not_given(tmp_path, trained):
    directory = save(tmp_path, trained)
    config = json.loads((directory / "config.json").read_text())
    config.update(sliding_window=4096, use_sliding_window=False)
    del config["pad_token_id"], config["bos_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    assert load_model(directory).config == trained.drafter.config


def public_only(directory, change):
    """A checkpoint of which only the public files are left, its weights changed."""
    (directory / "training.safetensors").unlink()
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


def test_an_unknown_weight_is_refused(tmp_path, trained):
    directory = public_only(
        save(tmp_path, trained), lambda weights: weights.update({"a.weight": torch.ones(1)})
    )
    with pytest.raises(CheckpointError, match=r"unknown weight 'a\.weight' \(1 wrong in all\)"):
        load_model(directory)


def test_a_missing_weight_is_refused(tmp_path, trained):
    directory = public_only(save(tmp_path, trained), lambda weights: weights.pop("fc.weight"))
    with pytest.raises(CheckpointError, match=r"missing weight 'fc\.weight' \(1 wrong in all\)"):
        load_model(directory)


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_a_directory_without_one_of_the_files_is_not_a_checkpoint(tmp_path, trained, name):
    directory = save(tmp_path, trained)
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=f"not a complete checkpoint: no {name}"):
        load_state(directory)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"progress": {"step": 1}, "config": {}}'])
def test_a_state_that_cannot_be_read_is_refused(tmp_path, trained, text):
    directory = save(tmp_path, trained)
    (directory / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        load_state(directory)


def test_a_state_of_another_format_is_refused(tmp_path, trained):
    path = save(tmp_path, trained) / "state.json"
    state = json.loads(path.read_text())
    assert state.pop("format") == checkpoint.FORMAT
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"another dflash \(format None, ") as no:
        load_state(path.parent)
    assert "start anew" in no.value.remedy


def test_the_name_comes_after_everything_is_on_disk(tmp_path, trained, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def record_rename(self, target):
        events.append(("rename", self, target))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    final = save(tmp_path, trained)

    staging = tmp_path / f".writing-{final.name}"
    assert events[-2:] == [("rename", staging, final), ("fsync", tmp_path)]
    assert events[-3] == ("fsync", staging)
    assert {path for _, path in events[:-3]} == {staging / name for name in checkpoint.FILES}


@pytest.mark.parametrize("failing", ["save_model", "save_file", "write_json"])
def test_a_save_that_fails_leaves_the_older_ones_and_no_new_name(
    tmp_path, trained, monkeypatch, failing
):
    first = save(tmp_path, trained, step=1)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, failing, fail)
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved: No space left"):
            save(tmp_path, trained, step=2)
    assert Checkpoints(tmp_path, 0, CONFIG).latest() == first
    load_state(first)
    # What the failed one left behind is in nobody's way.
    second = save(tmp_path, trained, step=2)
    assert Checkpoints(tmp_path, 0, CONFIG).all() == [first, second]
    assert sorted(path.name for path in second.iterdir()) == sorted(checkpoint.FILES)


def test_saving_a_step_again_replaces_it(tmp_path, trained):
    save(tmp_path, trained)
    again = save(tmp_path, trained.steps(3, 4))
    assert equal(load_model(again).parameters(), trained.drafter.parameters())


def names(directory):
    return [path.name for path in Checkpoints(directory, 0, CONFIG).all()]


def test_the_newest_are_kept(tmp_path, trained):
    for step in (1, 2, 10, 11):
        save(tmp_path, trained, step, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]


def test_0_keeps_all(tmp_path, trained):
    for step in (1, 2, 3):
        save(tmp_path, trained, step, keep=0)
    assert len(names(tmp_path)) == 3


def test_a_run_resumed_from_before_does_not_delete_what_it_just_saved(tmp_path, trained):
    for step in (1, 2, 9):
        save(tmp_path, trained, step)
    save(tmp_path, trained, step=3, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000009"]


def test_copies_under_other_names_are_neither_taken_nor_deleted(tmp_path, trained):
    first = save(tmp_path, trained, step=1)
    others = [tmp_path / "step-best", tmp_path / "step-00000001-keep-this"]
    for other in others:
        shutil.copytree(first, other)
    newest = save(tmp_path, trained, step=100_000_000, keep=1)
    assert names(tmp_path) == [newest.name]
    assert all(other.is_dir() for other in others)


def test_steps_are_in_the_order_of_their_numbers(tmp_path, trained):
    for step in (100_000_000, 99_999_999):
        save(tmp_path, trained, step)
    assert names(tmp_path) == ["step-99999999", "step-100000000"]


def test_an_empty_directory_has_no_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, CONFIG)
    assert (checkpoints.all(), checkpoints.latest()) == ([], None)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoints.require_latest()
