"""The DFlash drafter (arXiv 2602.06036), with the weight names of its public checkpoints.

T context tokens, P draft slots, D hidden size, F = captured layers x D, H query heads, G key heads,
E head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.attention import attend, attend_tiled, document_masks, tiled_mask


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
    """One pre-norm layer; the context only adds keys and values.

    Its work on each side of attention is a region: all layers share their compiled code.
    """

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
        regions: "Regions",
    ) -> Tensor:
        query_HPE, key_GKE, value_GKE = regions.before(self, hidden_PD, context_TD, rope_KE)
        out_HPE = regions.attend(query_HPE, key_GKE, value_GKE, mask)
        return regions.after(self, hidden_PD, out_HPE)

    def before_attention(
        self, hidden_PD: Tensor, context_TD: Tensor, rope_KE: "Rope"
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(hidden_PD), context_TD, rope_KE)

    def after_attention(self, hidden_PD: Tensor, out_HPE: Tensor) -> Tensor:
        hidden_PD = hidden_PD + self.self_attn.output(out_HPE)
        return hidden_PD + self.mlp(self.post_attention_layernorm(hidden_PD))


Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Regions:
    """The parts of every layer that may run compiled, and the masks that `attend` takes.

    As written: eager, with dense masks per document, for any shape.
    """

    before: Callable[..., tuple[Tensor, Tensor, Tensor]] = DraftLayer.before_attention
    attend: Callable[..., Tensor] = attend
    after: Callable[..., Tensor] = DraftLayer.after_attention
    masks: Callable[..., Any] = document_masks

    @classmethod
    def compiled(cls, compiled: Transform, *, tiled: bool) -> "Regions":
        """Each part through `compiled`, which turns a function into its compiled form.

        Args:
            tiled: attend with FlexAttention (T and P multiples of TILE); else as written.
        """
        before = compiled(DraftLayer.before_attention)
        after = compiled(DraftLayer.after_attention)
        if not tiled:
            return cls(before=before, after=after)
        return cls(before, compiled(attend_tiled), after, tiled_mask)


EAGER = Regions()


class Drafter(nn.Module):
    """Proposes the B - 1 tokens after an anchor in one pass.

    11 n + 3 weight tensors for n layers; embeddings and lm_head are the target's and not in here.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        captured = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(captured, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs_PD: Tensor,
        features_TF: Tensor,
        document_T: Tensor,
        position_T: Tensor,
        anchor_N: Tensor,
    ) -> Tensor:
        """`context`, then `draft`."""
        context_TD = self.context(features_TF)
        return self.draft(inputs_PD, context_TD, document_T, position_T, anchor_N)

    def context(self, features_TF: Tensor) -> Tensor:
        """What every layer reads of the target's captured hidden states, [T, D]."""
        return self.hidden_norm(self.fc(features_TF))

    def draft(
        self,
        inputs_PD: Tensor,
        context_TD: Tensor,
        document_T: Tensor,
        position_T: Tensor,
        anchor_N: Tensor,
        regions: Regions = EAGER,
    ) -> Tensor:
        """Hidden states of the draft slots after the final norm, [P, D], ready for the lm_head.

        Args:
            inputs_PD: embedded block inputs, block after block.
            context_TD: see `context`.
            document_T: document of each context token. position_T: its position there.
            anchor_N: context index of each block's anchor.
            regions: how the layers run.
        """
        block = self.config.block_size
        slot_B = torch.arange(block, device=anchor_N.device)
        position_P = (position_T[anchor_N][:, None] + slot_B).flatten()
        rope_KE = Rope.at(torch.cat([position_T, position_P]), self.config, inputs_PD.dtype)
        windows = {self.config.window(i) for i in range(self.config.num_layers)}
        masks = {w: regions.masks(document_T, anchor_N, block, w) for w in windows}
        hidden_PD = inputs_PD
        for i, layer in enumerate(self.layers):
            mask = masks[self.config.window(i)]
            hidden_PD = layer(hidden_PD, context_TD, rope_KE, mask, regions)
        return self.norm(hidden_PD)


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


def build_drafter(
    config: DrafterConfig, *, seed: int, device: torch.device, initializer_range: float = 0.02
) -> Drafter:
    """A drafter whose float32 weights depend on `seed` alone: replicas start bitwise equal.

    The weights are drawn on the CPU from a private generator, so that neither the device nor
    another thread's draws change them.
    """
    drafter = _empty(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, initializer_range, generator=generator)
    return drafter.to(device)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Within, a drafter with float32 weights computes in `dtype`, the target's."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def _empty(config: DrafterConfig) -> Drafter:
    # On the meta device: nn.Linear's own initialisation draws from the process-wide generator.
    with torch.device("meta"):
        drafter = Drafter(config)
    return drafter.to_empty(device="cpu")


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
