"""The shape of a drafter, and the one that fits a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter. Sizes follow the target, whose embeddings and lm_head it shares."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    sliding_window: int
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, 0 = full attention, as the last layer always is."""
        return self.sliding_window if layer < self.num_layers - 1 else 0


def are_layers(ids: Sequence[int], count: int) -> bool:
    """Whether these are layers of a target that has so many, in increasing order."""
    return list(ids) == sorted({i for i in ids if 0 <= i < count})


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Layers to capture: round(1 + i (L - 4) / (n - 1)); HF numbers their output id + 1.

    Qwen3-8B (36 layers, 5 draft layers): 1, 9, 17, 25, 33.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def drafter_config(
    text_config: Any,
    *,
    num_draft_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] | None,
    sliding_window: int,
) -> DrafterConfig:
    """The drafter that fits a target, from its (text) config of the transformers library."""
    heads = text_config.num_attention_heads
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some targets have one for each kind of layer
    layers = text_config.num_hidden_layers
    return DrafterConfig(
        hidden_size=text_config.hidden_size,
        intermediate_size=getattr(text_config, "intermediate_size", 3 * text_config.hidden_size),
        num_layers=num_draft_layers,
        num_heads=heads,
        num_key_value_heads=getattr(text_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
        vocab_size=text_config.vocab_size,
        rms_norm_eps=getattr(text_config, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_positions=text_config.max_position_embeddings,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids or default_target_layer_ids(layers, num_draft_layers),
        num_target_layers=layers,
        sliding_window=sliding_window,
        bos_token_id=getattr(text_config, "bos_token_id", None),
        eos_token_id=getattr(text_config, "eos_token_id", None),
        pad_token_id=getattr(text_config, "pad_token_id", None),
    )
