"""The layers of both peers' drafters, as a config of the transformers library."""

from typing import Any

from shapes import Shape
from transformers import Qwen3Config


def qwen3_config(shape: Shape, **more: Any) -> Qwen3Config:
    """The drafter's layers for both of them: full attention."""
    return Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        layer_types=["full_attention"] * shape.layers,
        tie_word_embeddings=False,
        **more,
    )
