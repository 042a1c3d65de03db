"""The drafter: names, seeds, positions, a layer against transformers, and that nothing leaks."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash.attention import block_mask, document_masks
from dflash.drafter import Drafter, build_drafter
from dflash.drafter_config import default_target_layer_ids, drafter_config
from dflash.layers import DraftLayer, HowLayersRun, Rope, dense_layer

CPU = torch.device("cpu")
# Two documents of 5 and 6 tokens, with blocks at the tokens 2, 4 | 6, 9.
DOCUMENTS = [0] * 5 + [1] * 6
POSITIONS = [*range(5), *range(6)]
ANCHORS = [2, 4, 6, 9]
BLOCK = 4


def qwen3(shape):
    return Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attn_implementation="eager",
    )


def randomise(module, seed=0):
    """Weights large enough that what a slot sees shows in its output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4, generator=generator)
    return module


@pytest.fixture
def case(drafter_shape):
    """A drafter in float64 and inputs for it; `run` takes changed ones."""
    shape = drafter_shape(block_size=BLOCK)
    drafter = randomise(build_drafter(shape, seed=0, device=CPU)).double()
    generator = torch.Generator().manual_seed(1)
    captured = len(shape.target_layer_ids) * shape.hidden_size
    inputs_PD = torch.randn(len(ANCHORS) * BLOCK, shape.hidden_size, generator=generator).double()
    features_TF = torch.randn(len(DOCUMENTS), captured, generator=generator).double()

    def run(inputs_PD=inputs_PD, features_TF=features_TF, model=drafter, positions=POSITIONS):
        return model(
            inputs_PD,
            features_TF,
            torch.tensor(DOCUMENTS),
            torch.tensor(positions),
            torch.tensor(ANCHORS),
        )

    return SimpleNamespace(
        shape=shape, drafter=drafter, inputs_PD=inputs_PD, features_TF=features_TF, run=run
    )


def moved_blocks(before_PD, after_PD):
    """Blocks all of whose slots moved; a block that moved in part is an error."""
    moved_NB = (before_PD != after_PD).any(1).view(-1, BLOCK)
    assert (moved_NB.all(1) == moved_NB.any(1)).all()
    return moved_NB.all(1).nonzero().flatten().tolist()


def may_see(token):
    """Blocks that may see a context token: later anchors of the same document."""
    return [b for b, a in enumerate(ANCHORS) if DOCUMENTS[a] == DOCUMENTS[token] and token < a]


@pytest.mark.parametrize("token", range(len(DOCUMENTS)))
def test_a_context_token_moves_later_blocks_of_its_document_only(case, token):
    features_TF = case.features_TF.clone()
    features_TF[token] += 1.0
    assert moved_blocks(case.run(), case.run(features_TF=features_TF)) == may_see(token)


@pytest.mark.parametrize("slot", range(len(ANCHORS) * BLOCK))
def test_a_block_input_moves_its_own_block_only(case, slot):
    inputs_PD = case.inputs_PD.clone()
    inputs_PD[slot] += 1.0
    assert moved_blocks(case.run(), case.run(inputs_PD=inputs_PD)) == [slot // BLOCK]


def test_gradients_say_the_same_as_perturbations(case):
    inputs_PD = case.inputs_PD.clone().requires_grad_()
    features_TF = case.features_TF.clone().requires_grad_()
    hidden_PD = case.run(inputs_PD, features_TF)
    for block in range(len(ANCHORS)):
        out = hidden_PD[block * BLOCK : (block + 1) * BLOCK].square().sum()
        d_inputs, d_features = torch.autograd.grad(out, [inputs_PD, features_TF], retain_graph=True)
        seen = d_features.abs().sum(1).nonzero().flatten().tolist()
        assert seen == [t for t in range(len(DOCUMENTS)) if block in may_see(t)]
        assert (d_inputs.abs().sum(1).nonzero().flatten() // BLOCK).unique().tolist() == [block]


def test_a_sliding_layer_below_a_full_one_leaks_neither(case, drafter_shape):
    shape = drafter_shape(block_size=BLOCK, sliding_window=3)
    drafter = randomise(build_drafter(shape, seed=0, device=CPU)).double()
    before = case.run(model=drafter)
    assert not torch.equal(before, case.run())
    for token in range(len(DOCUMENTS)):
        features_TF = case.features_TF.clone()
        features_TF[token] += 1.0
        after = case.run(features_TF=features_TF, model=drafter)
        assert moved_blocks(before, after) == may_see(token)


def test_a_document_gives_the_same_alone(case):
    together_PD = case.run()
    alone_PD = case.drafter(
        case.inputs_PD[2 * BLOCK :],
        case.features_TF[5:],
        torch.zeros(6, dtype=torch.long),
        torch.arange(6),
        torch.tensor([1, 4]),
    )
    torch.testing.assert_close(together_PD[2 * BLOCK :], alone_PD)


def test_the_context_and_the_output_are_normed(case):
    # RMS norm forgets the scale.
    larger = case.run(features_TF=100 * case.features_TF)
    torch.testing.assert_close(larger, case.run(), rtol=1e-4, atol=1e-4)
    rms_P = (case.run() / case.drafter.norm.weight).square().mean(1).sqrt()
    torch.testing.assert_close(rms_P, torch.ones_like(rms_P), rtol=1e-4, atol=0)


def test_slot_k_stands_at_the_anchors_position_plus_k(case):
    seen = []
    original = Rope.at

    def spy(position_K, config, dtype):
        seen.append(position_K.tolist())
        return original(position_K, config, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rope, "at", spy)
        case.run()
    slots = [[POSITIONS[a] + k for k in range(BLOCK)] for a in ANCHORS]
    assert seen == [[*POSITIONS, *itertools.chain(*slots)]]


def test_only_distances_matter_and_they_do(case):
    later = [p + 100 for p in POSITIONS]
    torch.testing.assert_close(case.run(positions=later), case.run(), rtol=1e-4, atol=1e-4)
    stretched = [2 * p for p in POSITIONS]
    assert (case.run(positions=stretched) - case.run()).abs().max() > 1e-2


@pytest.mark.parametrize("theta", [10000.0, 1e7])
def test_rope_equals_transformers(drafter_shape, theta):
    shape = drafter_shape(rope_theta=theta)
    position_K = torch.tensor([0, 1, 5, 127, 8191])
    generator = torch.Generator().manual_seed(0)
    query_HKE = torch.randn(4, 5, 8, generator=generator)
    cos, sin = Qwen3RotaryEmbedding(qwen3(shape))(query_HKE, position_K[None])
    expected, _ = apply_rotary_pos_emb(query_HKE[None], query_HKE[None], cos, sin)

    rope = Rope.at(position_K, shape, torch.float32)
    torch.testing.assert_close(rope.rotate(query_HKE), expected[0], rtol=1e-5, atol=1e-3)
    near = position_K < 1000
    torch.testing.assert_close(rope.rotate(query_HKE)[:, near], expected[0][:, near])
    torch.testing.assert_close(rope.tail(2).rotate(query_HKE[:, 3:]), rope.rotate(query_HKE)[:, 3:])


def test_a_layer_equals_one_assembled_from_transformers(drafter_shape):
    shape = drafter_shape(block_size=3)
    layer = randomise(DraftLayer(shape))
    config = qwen3(shape)
    attention = Qwen3Attention(config, layer_idx=0)
    attention.load_state_dict(layer.self_attn.state_dict())
    mlp = Qwen3MLP(config)
    mlp.load_state_dict(layer.mlp.state_dict())
    norms = [Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(2)]
    norms[0].load_state_dict(layer.input_layernorm.state_dict())
    norms[1].load_state_dict(layer.post_attention_layernorm.state_dict())

    generator = torch.Generator().manual_seed(2)
    context_TD = torch.randn(6, shape.hidden_size, generator=generator)
    hidden_PD = torch.randn(6, shape.hidden_size, generator=generator)
    document_T, anchor_N = torch.zeros(6, dtype=torch.long), torch.tensor([2, 5])
    position_K = torch.tensor([0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7])

    # The context's own queries are computed and thrown away; any mask will do for them.
    sees_PK = block_mask(document_T, anchor_N, 3)
    additive_KK = torch.zeros(12, 12)
    additive_KK[6:].masked_fill_(~sees_PK, -torch.inf)
    states_1KD = torch.cat([context_TD, norms[0](hidden_PD)])[None]
    rotary = Qwen3RotaryEmbedding(config)(states_1KD, position_K[None])
    attended, _ = attention(states_1KD, rotary, additive_KK[None, None])
    expected_PD = hidden_PD + attended[0, 6:]
    expected_PD = expected_PD + mlp(norms[1](expected_PD))

    rope = Rope.at(position_K, shape, torch.float32)
    masks = document_masks(document_T, anchor_N, 3)
    out_PD = dense_layer(layer, hidden_PD, context_TD, rope, masks)
    torch.testing.assert_close(out_PD, expected_PD)


def test_weights_have_their_public_names(drafter_shape):
    per_layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"self_attn.{p}_norm" for p in "qk"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    ]
    for layers in (1, 2, 5):
        drafter = build_drafter(drafter_shape(num_layers=layers), seed=0, device=CPU)
        names = ["fc", "hidden_norm", "norm"]
        names += [f"layers.{i}.{name}" for i in range(layers) for name in per_layer]
        assert len(names) == 11 * layers + 3
        assert set(drafter.state_dict()) == {f"{name}.weight" for name in names}


def test_the_seed_alone_decides_the_first_weights(drafter_shape):
    def weights(seed):
        drafter = build_drafter(drafter_shape(), seed=seed, device=CPU)
        return list(drafter.parameters())

    before = torch.get_rng_state()
    first = weights(3)
    assert torch.get_rng_state().equal(before)
    torch.rand(1)
    assert all(a.equal(b) for a, b in zip(first, weights(3), strict=True))
    assert any(not a.equal(b) for a, b in zip(first, weights(4), strict=True))
    assert all(p.dtype == torch.float32 and p.requires_grad for p in first)
    assert first[0].std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (64, 5, (1, 16, 31, 46, 61)), (30, 2, (1, 27)), (30, 1, (15,))],
)
def test_default_layers_are_spread_over_the_target(target_layers, draft_layers, ids):
    assert default_target_layer_ids(target_layers, draft_layers) == ids


def test_all_layers_but_the_last_have_the_sliding_window(drafter_shape):
    shape = drafter_shape(num_layers=5, sliding_window=2048)
    assert [shape.window(i) for i in range(5)] == [2048] * 4 + [0]


def test_the_drafter_follows_its_target(tiny_model):
    shape = drafter_config(
        tiny_model.config,
        num_draft_layers=2,
        block_size=8,
        mask_token_id=7,
        target_layer_ids=None,
        sliding_window=0,
    )
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (128, 320, 2048)
    assert (shape.num_heads, shape.num_key_value_heads, shape.head_dim) == (8, 4, 16)
    assert (shape.rope_theta, shape.max_positions, shape.num_target_layers) == (1e4, 1024, 6)
    assert shape.target_layer_ids == (1, 3)
    assert (shape.bos_token_id, shape.eos_token_id, shape.pad_token_id) == (0, 2, 0)


@pytest.mark.parametrize("window", [0, 6])
def test_a_layer_traced_with_a_tiled_mask_is_the_dense_one(drafter_shape, window):
    """FlexAttention as a graph without a break; it has no backward on the CPU."""
    shape = drafter_shape(block_size=16, head_dim=16, sliding_window=window, num_layers=2)
    drafter = randomise(Drafter(shape))
    random = torch.Generator().manual_seed(3)
    document_T = torch.arange(128) // 70
    position_T = torch.arange(128) % 70
    anchor_N = torch.tensor([3, 9, 20, 40, 72, 80, 90, 100])
    inputs_PD, context_TD = (
        torch.randn(128, shape.hidden_size, generator=random) for _ in range(2)
    )
    case = (inputs_PD, context_TD, document_T, position_T, anchor_N)

    def traced(function):
        return torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)

    with torch.no_grad():
        tiled_PD = drafter.draft(*case, HowLayersRun.compiled(traced, tiled=True))
        torch.testing.assert_close(tiled_PD, drafter.draft(*case), rtol=1e-4, atol=1e-5)
