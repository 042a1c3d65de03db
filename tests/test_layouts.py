"""config.json of the public layouts: what is written, and what is refused, by name."""

import json

import pytest

from dflash.errors import CheckpointError
from dflash.layouts import Verifier, drafter_from, speculators_config, zlab_config

WHERE = "there/config.json"
VERIFIER = Verifier("Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])


def speculators(config):
    return speculators_config(config, VERIFIER, "bfloat16")


def read(public, layers=6):
    """As it comes back from disk."""
    return drafter_from(json.loads(json.dumps(public)), WHERE, layers)


@pytest.mark.parametrize("write", [zlab_config, speculators])
@pytest.mark.parametrize("window", [0, 64])
def test_what_is_written_reads_back(drafter_shape, write, window):
    shape = drafter_shape(num_layers=3, sliding_window=window, eos_token_id=[2, 3])
    assert read(write(shape)) == shape


def test_the_speculators_layout(drafter_shape):
    """The values that the package of that name writes (0.9.0), for the same drafter."""
    public = speculators(drafter_shape())
    assert public["speculators_model_type"] == "dflash"
    assert public["aux_hidden_state_layer_ids"] == [2, 4]
    assert public["sample_from_anchor"] is False
    assert (public["draft_vocab_size"], public["block_size"], public["mask_token_id"]) == (
        32,
        4,
        31,
    )
    assert public["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    }
    layers = public["transformer_layer_config"]
    assert (layers["model_type"], layers["num_hidden_layers"]) == ("qwen3", 2)
    assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"] == 10000.0


def test_the_targets_last_layer_has_no_number_in_speculators(drafter_shape):
    with pytest.raises(CheckpointError, match=r"captures the target's last layer \(5\)"):
        speculators(drafter_shape(target_layer_ids=(1, 5)))


def test_speculators_does_not_say_how_many_layers_the_target_has(drafter_shape):
    with pytest.raises(CheckpointError, match="how many layers the target has") as raised:
        read(speculators(drafter_shape()), layers=None)
    assert "--target-model" in raised.value.remedy


NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "num_target_layers",
    "dflash_config",
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_field_is_named(drafter_shape, name):
    public = zlab_config(drafter_shape())
    del public[name]
    with pytest.raises(CheckpointError, match=rf"^{WHERE}: no field '{name}'$"):
        read(public)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_a_missing_field_of_dflash_is_named(drafter_shape, name):
    public = zlab_config(drafter_shape())
    del public["dflash_config"][name]
    with pytest.raises(CheckpointError, match=f"{WHERE}: dflash_config: no field '{name}'"):
        read(public)


@pytest.mark.parametrize(
    "name",
    ["speculators_config", "transformer_layer_config", "mask_token_id", "draft_vocab_size"],
)
def test_a_missing_field_of_speculators_is_named(drafter_shape, name):
    public = speculators(drafter_shape())
    del public[name]
    if name == "speculators_config":  # says nothing that the drafter needs
        assert read(public) == drafter_shape()
    else:
        with pytest.raises(CheckpointError, match=f"no field '{name}'"):
            read(public)


@pytest.mark.parametrize("inside", [None, "dflash_config"])
def test_an_unknown_field_could_change_the_drafter(drafter_shape, inside):
    """z-lab's code reads such fields: input_embedding_scale multiplies the embeddings."""
    public = zlab_config(drafter_shape())
    (public[inside] if inside else public)["input_embedding_scale"] = 2.0
    with pytest.raises(CheckpointError, match=r"unknown field 'input_embedding_scale', got 2\.0"):
        read(public)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("hidden_act", "gelu", "must be 'silu'"),
        ("attention_bias", True, "must be False"),
        ("model_type", "llama", "must be 'qwen3'"),
        ("rope_scaling", {"type": "yarn"}, "must be None"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "must be of rope_type"),
        ("rope_theta", 5.0, "must be that of rope_parameters"),
        ("layer_types", ["sliding_attention"] * 2, "must be"),
        ("hidden_size", "16", "must be a whole number"),
        ("block_size", True, "must be a whole number"),
        ("rms_norm_eps", "abc", "must be a number"),
        ("hidden_size", 0, "must be at least 1"),
        ("dflash_config", None, "must hold fields"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(drafter_shape, name, value, rule):
    public = {**zlab_config(drafter_shape()), name: value}
    with pytest.raises(CheckpointError, match=f"{name}.*{rule}"):
        read(public)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("block_size", 1, "must be at least 2"),
        ("mask_token_id", 10**6, "must be below vocab_size"),
        ("target_layer_ids", [], "must be increasing layers of the target, 0 to"),
        ("target_layer_ids", [3, 1], "must be increasing layers of the target, 0 to"),
        ("target_layer_ids", [1, 10**6], "must be increasing layers of the target, 0 to"),
    ],
)
def test_a_value_of_dflash_out_of_its_range_is_named(drafter_shape, name, value, rule):
    public = zlab_config(drafter_shape())
    public["dflash_config"] = {**public["dflash_config"], name: value}
    public["block_size"] = public["dflash_config"]["block_size"]
    with pytest.raises(CheckpointError, match=f"{name} {rule}"):
        read(public)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculators_model_type", "eagle3"),
        ("sample_from_anchor", True),
        ("sliding_window_non_causal", True),
        ("draft_vocab_size", 16),
        ("target_hidden_size", 99),
        ("aux_hidden_state_layer_ids", "2,4"),
        ("t2d", [1]),
    ],
)
def test_other_kinds_of_speculators_are_refused(drafter_shape, name, value):
    with pytest.raises(CheckpointError, match=name):
        read({**speculators(drafter_shape()), name: value})


@pytest.mark.parametrize("place", ["top", "inside"])
def test_block_size_may_stand_in_either_place(drafter_shape, place):
    public = zlab_config(drafter_shape())
    del (public["dflash_config"] if place == "top" else public)["block_size"]
    assert read(public) == drafter_shape()


def test_two_block_sizes_are_refused(drafter_shape):
    public = zlab_config(drafter_shape())
    public["dflash_config"]["block_size"] = 8
    with pytest.raises(CheckpointError, match="block_size must be the 4 of the top level, got 8"):
        read(public)


def test_rope_theta_of_transformers_4(drafter_shape):
    public = zlab_config(drafter_shape(rope_theta=1e6))
    del public["rope_parameters"]
    assert read(public).rope_theta == 1e6
    del public["rope_theta"]
    with pytest.raises(CheckpointError, match="rope_theta"):
        read(public)
