"""One layer of the drafter (arXiv 2602.06036), and how layers run.

T context tokens, P draft slots, D hidden size, H query heads, G key heads, E head size, K keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.attention import attend, attend_tiled, document_masks, tiled_mask
from dflash.drafter_config import DrafterConfig


class RMSNorm(nn.RMSNorm):
    """In the input's dtype: a float32 weight on bfloat16 input would miss the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Queries from the draft slots; keys and values from the context and the draft slots."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)
        self.q_norm = RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head, eps=config.rms_norm_eps)

    def project(
        self, hidden_PD: Tensor, context_TD: Tensor, rope_KE: "Rope"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, P, E], keys and values [G, K, E], rotated."""
        keys_KD = torch.cat([context_TD, hidden_PD])
        query_HPE = self.q_norm(self._heads(self.q_proj(hidden_PD)))
        key_GKE = self.k_norm(self._heads(self.k_proj(keys_KD)))
        value_GKE = self._heads(self.v_proj(keys_KD))
        query_HPE = rope_KE.tail(len(hidden_PD)).rotate(query_HPE)
        return query_HPE, rope_KE.rotate(key_GKE), value_GKE

    def output(self, out_HPE: Tensor) -> Tensor:
        """What the heads read, put together: [P, D]."""
        return self.o_proj(out_HPE.transpose(0, 1).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)


class MLP(nn.Module):
    """Qwen3's gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_PD)) * self.up_proj(hidden_PD))


class DraftLayer(nn.Module):
    """One pre-norm layer; the context only adds keys and values."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_PD: Tensor,
        context_TD: Tensor,
        rope_KE: "Rope",
        mask: Any,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        query_HPE, key_GKE, value_GKE = self.before_attention(hidden_PD, context_TD, rope_KE)
        return self.after_attention(hidden_PD, attend(query_HPE, key_GKE, value_GKE, mask))

    def before_attention(
        self, hidden_PD: Tensor, context_TD: Tensor, rope_KE: "Rope"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; see `Attention.project`."""
        return self.self_attn.project(self.input_layernorm(hidden_PD), context_TD, rope_KE)

    def after_attention(self, hidden_PD: Tensor, out_HPE: Tensor) -> Tensor:
        """What the layer makes of what its heads have read."""
        hidden_PD = hidden_PD + self.self_attn.output(out_HPE)
        return hidden_PD + self.mlp(self.post_attention_layernorm(hidden_PD))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding at absolute positions, the two halves of a head rotated (as in Qwen3)."""

    cos_KE: Tensor
    sin_KE: Tensor

    @classmethod
    def at(cls, position_K: Tensor, config: DrafterConfig, dtype: torch.dtype) -> "Rope":
        """Angles in float32 (bf16 cannot tell large positions apart), tables in `dtype`."""
        exponent = torch.arange(0, config.head_dim, 2, device=position_K.device) / config.head_dim
        angle = position_K[:, None].float() * config.rope_theta ** -exponent.float()
        angle_KE = torch.cat([angle, angle], dim=-1)
        return cls(angle_KE.cos().to(dtype), angle_KE.sin().to(dtype))

    def tail(self, count: int) -> "Rope":
        """The last `count` positions."""
        return Rope(self.cos_KE[-count:], self.sin_KE[-count:])

    def rotate(self, x_HKE: Tensor) -> Tensor:
        """Rotate heads [H, K, E]."""
        low, high = x_HKE.chunk(2, dim=-1)
        return x_HKE * self.cos_KE + torch.cat([-high, low], dim=-1) * self.sin_KE


def dense_layer(
    layer: DraftLayer, hidden_PD: Tensor, context_TD: Tensor, rope_KE: Rope, mask: Any
) -> Tensor:
    """A layer under dense masks."""
    return layer(hidden_PD, context_TD, rope_KE, mask, attend)


def tiled_layer(
    layer: DraftLayer, hidden_PD: Tensor, context_TD: Tensor, rope_KE: Rope, mask: Any
) -> Tensor:
    """A layer under a tiled mask; to be compiled."""
    return layer(hidden_PD, context_TD, rope_KE, mask, attend_tiled)


@dataclass(frozen=True)
class HowLayersRun:
    """One function for all layers, and what makes the masks that it takes.

    As written: eager, with dense masks per document, for any shape.
    """

    layer: Callable[..., Tensor] = dense_layer
    masks: Callable[..., Any] = document_masks

    @classmethod
    def compiled(
        cls, compiled: Callable[[Callable[..., Any]], Callable[..., Any]], *, tiled: bool
    ) -> "HowLayersRun":
        """Through `compiled`, which turns a function into its compiled form, for all layers.

        Args:
            tiled: a whole layer with FlexAttention (T and P multiples of TILE); else its work on
                each side of attention, which stays as written.
        """
        if tiled:
            return cls(compiled(tiled_layer), tiled_mask)
        before = compiled(DraftLayer.before_attention)
        after = compiled(DraftLayer.after_attention)

        def around_attention(
            layer: DraftLayer, hidden_PD: Tensor, context_TD: Tensor, rope_KE: Rope, mask: Any
        ) -> Tensor:
            query_HPE, key_GKE, value_GKE = before(layer, hidden_PD, context_TD, rope_KE)
            return after(layer, hidden_PD, attend(query_HPE, key_GKE, value_GKE, mask))

        return cls(around_attention)


EAGER = HowLayersRun()
