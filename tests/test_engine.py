"""A target and a drafter that decode together."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.drafter import build_drafter
from dflash.drafter_config import drafter_config
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.target import Target


def engine_of(sizes, rope, max_new_tokens):
    config = Qwen3Config(**sizes, max_position_embeddings=256, rope_parameters=rope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = Target(Qwen3ForCausalLM(config), (1, 3))
    shape = drafter_config(
        config,
        num_draft_layers=1,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(1, 3),
        sliding_window=0,
    )
    drafter = build_drafter(shape, seed=0, device=torch.device("cpu"))
    return Engine(None, "", target, drafter, target.head, None, [], max_new_tokens)


def test_a_text_may_become_as_long_as_the_rotary_embedding_stays_the_same(small_sizes, longrope):
    prompt, rope = list(range(4, 24)), longrope(16)
    engine = engine_of(small_sizes, rope, 40)
    steps = [token for step in engine.steps(prompt) for token in step.tokens]
    assert steps == engine.plain(prompt)
    assert len(steps) == 40

    longer = engine_of(small_sizes, rope, 41)
    for decode in (longer.plain, longer.steps):
        with pytest.raises(ConfigError, match="--max-new-tokens must fit, with a prompt of 20"):
            decode(prompt)
    engine_of(small_sizes, {"rope_type": "default", "rope_theta": 1e4}, 41).plain(prompt)
