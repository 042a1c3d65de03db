"""Exported checkpoints: the same outputs in an oracle, and in the packages they are meant for.

DFLASH_PEERS_PYTHON names a Python in which z-lab's `dflash` and `speculators` are installed. Its
environment must be another one: z-lab's import name is ours.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dflash import checkpoint, export
from dflash.attention import block_mask
from dflash.checkpoint import load_model, save_model
from dflash.cli import main
from dflash.drafter import build_drafter
from dflash.drafter_config import drafter_config
from dflash.errors import Exit

PEERS = os.environ.get("DFLASH_PEERS_PYTHON")
needs_peers = pytest.mark.skipif(
    not PEERS, reason="DFLASH_PEERS_PYTHON names no Python with z-lab's dflash and speculators"
)
T, ANCHORS = 20, (4, 9, 17)


def new_drafter(model, seed=1, **changes):
    """Weights far from the first ones, norms included, so that no term is lost in another."""
    shape = drafter_config(
        model.config,
        **{
            "num_draft_layers": 2,
            "block_size": 4,
            "mask_token_id": 3,
            "target_layer_ids": (1, 3),
            "sliding_window": 0,
            **changes,
        },
    )
    drafter = build_drafter(shape, seed=seed, device=torch.device("cpu"), initializer_range=0.1)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return drafter


@pytest.fixture(scope="module")
def drafter(tiny_model):
    return new_drafter(tiny_model)


@pytest.fixture
def saved(tmp_path, drafter):
    """That drafter as a checkpoint on disk, in bfloat16."""
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    save_model(drafter, directory)
    return directory


@pytest.fixture
def exported(saved, tmp_path, tiny_target_dir):
    """A function that runs `dflash export`; returns the directory."""

    def run(layout, *options, source=saved, out="out"):
        arguments = [str(source), str(tmp_path / out), "--format", layout, *options]
        result = CliRunner().invoke(
            main, ["export", *arguments, "--target-model", str(tiny_target_dir)]
        )
        assert result.exit_code == 0, result.output
        return tmp_path / out

    return run


def inputs_of(drafter):
    """A document of T tokens and a block at each anchor."""
    random = torch.Generator().manual_seed(0)
    config, anchor_N = drafter.config, torch.tensor(ANCHORS)
    features = len(config.target_layer_ids) * config.hidden_size
    slot_B = torch.arange(config.block_size)
    position_P = (anchor_N[:, None] + slot_B).flatten()
    return {
        "features_TF": torch.randn(T, features, generator=random),
        "inputs_PD": torch.randn(len(position_P), config.hidden_size, generator=random),
        "anchor_N": anchor_N,
        "position_K": torch.cat([torch.arange(T), position_P]),
        "mask_PK": block_mask(torch.zeros(T, dtype=torch.long), anchor_N, len(slot_B)).int(),
    }


@torch.no_grad()
def ours(drafter, inputs):
    position_T = torch.arange(T)
    return drafter(
        inputs["inputs_PD"],
        inputs["features_TF"],
        torch.zeros_like(position_T),
        position_T,
        torch.tensor(ANCHORS),
    )


def reference(directory, inputs):
    """The layout's definition, from the files alone, in float64 and one head at a time."""
    weights = {k: v.double() for k, v in load_file(directory / "model.safetensors").items()}
    public = json.loads((directory / "config.json").read_text())
    fields = public.get("transformer_layer_config", public)
    size, eps = fields["head_dim"], fields["rms_norm_eps"]
    shared = fields["num_attention_heads"] // fields["num_key_value_heads"]
    angles = [fields["rope_theta"] ** (-2 * i / size) for i in range(size // 2)]
    angle_KE = inputs["position_K"][:, None].double() * torch.tensor(angles * 2)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name + ".weight"]

    def rotated(x, angle):
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
        return x * angle.cos() + half * angle.sin()

    def linear(x, name):
        return x @ weights[name + ".weight"].T

    context = norm(linear(inputs["features_TF"].double(), "fc"), "hidden_norm")
    x = inputs["inputs_PD"].double()
    hidden = (inputs["mask_PK"] == 0).nonzero().T
    for i in range(fields["num_hidden_layers"]):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        normed = norm(x, layer + "input_layernorm")
        keys = torch.cat([context, normed])
        heads = []
        for h in range(fields["num_attention_heads"]):
            mine = slice(h * size, (h + 1) * size)
            theirs = slice(h // shared * size, (h // shared + 1) * size)
            q = norm(
                linear(normed, layer + "self_attn.q_proj")[:, mine], layer + "self_attn.q_norm"
            )
            k = norm(
                linear(keys, layer + "self_attn.k_proj")[:, theirs], layer + "self_attn.k_norm"
            )
            v = linear(keys, layer + "self_attn.v_proj")[:, theirs]
            scores = rotated(q, angle_KE[-len(q) :]) @ rotated(k, angle_KE).T / math.sqrt(size)
            scores[tuple(hidden)] = -math.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, dim=-1), attn + "o_proj")
        normed = norm(x, layer + "post_attention_layernorm")
        gate = linear(normed, layer + "mlp.gate_proj")
        up = linear(normed, layer + "mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, layer + "mlp.down_proj")
    return norm(x, "norm")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_an_exported_drafter_computes_the_same(exported, saved, drafter, layout, dtype):
    inputs = inputs_of(drafter)
    theirs = reference(exported(layout, "--dtype", dtype), inputs)
    torch.testing.assert_close(
        theirs.float(), ours(load_model(saved), inputs), rtol=1e-4, atol=1e-4
    )
    # The only difference to the drafter in memory is the rounding of its checkpoint.
    assert 1e-3 < (theirs - ours(drafter, inputs)).abs().max() < 0.2


def test_the_oracle_notices_a_swapped_projection(exported, drafter):
    """The control."""
    directory = exported("z-lab", "--dtype", "float32")
    weights = load_file(directory / "model.safetensors")
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "kv"]
    weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
    save_file(weights, directory / "model.safetensors")
    inputs = inputs_of(drafter)
    assert (reference(directory, inputs) - ours(drafter, inputs)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_names_shapes_and_dtypes(exported, drafter, layout, dtype):
    directory = exported(layout, "--dtype", dtype)
    weights = load_file(directory / "model.safetensors")
    assert {name: w.shape for name, w in weights.items()} == {
        name: w.shape for name, w in drafter.state_dict().items()
    }
    assert len(weights) == 11 * 2 + 3
    assert {w.dtype for w in weights.values()} == {getattr(torch, dtype)}
    public = json.loads((directory / "config.json").read_text())
    assert public["dtype"] == dtype
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_a_layout_can_be_turned_into_the_other(exported, saved):
    there = exported("speculators", "--verifier", "Qwen/Qwen3-8B", out="there")
    public = json.loads((there / "config.json").read_text())
    assert public["speculators_config"]["verifier"] == {
        "name_or_path": "Qwen/Qwen3-8B",
        "architectures": ["Qwen3ForCausalLM"],
    }
    back = exported("z-lab", source=there, out="back")
    for name in ("config.json", "model.safetensors"):
        assert (back / name).read_bytes() == (saved / name).read_bytes()


def test_the_targets_weights_in_older_speculators_files_are_left_out(exported, tiny_model):
    directory = exported("speculators")
    weights = load_file(directory / "model.safetensors")
    weights["embed_tokens.weight"] = tiny_model.get_input_embeddings().weight.detach().clone()
    save_file(weights, directory / "model.safetensors")
    load_model(directory, num_target_layers=6)
    weights["d2t"] = torch.zeros(3)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="unknown weight 'd2t'"):
        load_model(directory, num_target_layers=6)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(128, 128), r"'fc.weight' must be floating-point of shape \[128, 256\]"),
        (torch.zeros(128, 256).int(), r"got torch.int32 of \[128, 256\]"),
    ],
)
def test_a_weight_of_another_shape_or_kind_is_named(saved, weight, message):
    weights = load_file(saved / "model.safetensors")
    weights["fc.weight"] = weight
    save_file(weights, saved / "model.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=message):
        load_model(saved)


def refusal(arguments):
    result = CliRunner().invoke(main, ["export", *map(str, arguments)])
    assert result.exit_code == Exit.FAILED, result.output
    return result.stderr


def test_nothing_is_overwritten(saved, tmp_path):
    (tmp_path / "there").mkdir()
    assert "exists already" in refusal([saved, tmp_path / "there", "--format", "z-lab"])
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in refusal([saved, tmp_path / "link", "--format", "z-lab"])
    (tmp_path / "file").touch()
    said = refusal([saved, tmp_path / "file" / "out", "--format", "z-lab"])
    assert "could not be written" in said
    assert "Not a directory" in said


def test_numbers_that_a_dtype_cannot_hold_are_found(tmp_path, tiny_model):
    drafter = new_drafter(tiny_model)
    with torch.no_grad():
        drafter.norm.weight[5] = 1e6
    (tmp_path / "source").mkdir()
    save_model(drafter, tmp_path / "source")
    arguments = [tmp_path / "source", tmp_path / "out", "--format", "z-lab", "--dtype", "float16"]
    assert "'norm.weight' has values that torch.float16 cannot hold" in refusal(arguments)
    assert not (tmp_path / "out").exists()


def test_an_export_for_another_target_is_refused(saved, tmp_path, tiny_target_dir):
    other = tmp_path / "target"
    other.mkdir()
    public = json.loads((tiny_target_dir / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**public, "vocab_size": 4096}))
    arguments = [saved, tmp_path / "out", "--format", "z-lab", "--target-model", other]
    assert "its vocabulary size is 2048, the target's 4096" in refusal(arguments)


@pytest.mark.parametrize(
    "failing", ["dflash.export.write_model", "dflash.export._check_written", "dflash.durable.fsync"]
)
def test_an_export_appears_whole_or_not_at_all(saved, tmp_path, monkeypatch, failing):
    def fail(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(checkpoint.CheckpointError, match="out could not be written: No space left"):
        export.export(
            saved, tmp_path / "out", "z-lab", dtype="bfloat16", target_model=None, verifier=None
        )
    assert not list(tmp_path.glob("*out*"))


def peer(*arguments):
    """Run tests/peer_forward.py in the other Python, without this project on its path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PEERS, "-P", Path(__file__).with_name("peer_forward.py"), *arguments],
        env={**environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@needs_peers
@pytest.mark.parametrize(("layout", "window"), [("z-lab", 0), ("z-lab", 6), ("speculators", 0)])
def test_the_package_it_is_meant_for_computes_the_same(
    tmp_path, tiny_model, exported, layout, window
):
    """With masks and positions of its own. (speculators counts a window from the anchor on.)"""
    drafter = new_drafter(tiny_model, sliding_window=window)
    source = tmp_path / "source"
    source.mkdir()
    save_model(drafter, source)
    directory = exported(layout, "--dtype", "float32", source=source)
    inputs = inputs_of(drafter)
    save_file(inputs, tmp_path / "inputs.safetensors")
    peer(layout, directory, tmp_path / "inputs.safetensors", tmp_path / "theirs.safetensors")
    theirs = load_file(tmp_path / "theirs.safetensors")["hidden_PD"]
    expected = ours(load_model(directory, num_target_layers=6), inputs)
    print(f"{layout}: max difference {float((theirs - expected).abs().max()):.2g}")
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)


@needs_peers
def test_a_checkpoint_that_speculators_wrote_loads(tmp_path, tiny_target_dir):
    theirs = tmp_path / "theirs"
    peer("save-speculators", theirs, tiny_target_dir)
    drafter = load_model(theirs, num_target_layers=6)
    assert drafter.config.target_layer_ids == (1, 3)
    inputs = inputs_of(drafter)
    save_file(inputs, tmp_path / "inputs.safetensors")
    peer("speculators", theirs, tmp_path / "inputs.safetensors", tmp_path / "out.safetensors")
    expected = load_file(tmp_path / "out.safetensors")["hidden_PD"]
    torch.testing.assert_close(ours(drafter, inputs), expected, rtol=1e-4, atol=1e-4)
