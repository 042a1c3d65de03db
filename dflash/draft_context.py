"""What a drafter has read of a growing text, kept from one draft to the next.

T tokens read so far, M new ones, B slots of a block, S = B - 1 drafted, D hidden size, F = captured
layers x D, G key heads, E head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.attention import block_mask
from dflash.drafter import Drafter, autocast
from dflash.layers import DraftLayer, Rope
from dflash.target import FrozenHead


class DraftContext:
    """Each layer's keys and values of one text, so that a draft reads no token of it again.

    Drafts as `decode.draft_logits` does, for one anchor: the token after those that were read.
    """

    def __init__(self, drafter: Drafter, head: FrozenHead) -> None:
        self.drafter, self.head, self.length = drafter, head, 0
        config = drafter.config
        nothing_GTE = head.embedding_VD.new_empty(config.num_key_value_heads, 0, config.head_dim)
        self._layers = [
            _Kept(cast(DraftLayer, one), nothing_GTE, nothing_GTE) for one in drafter.layers
        ]

    @torch.no_grad()
    def read(self, features_MF: Tensor) -> None:
        """Add tokens, given the target's captured hidden states of them."""
        dtype = self.head.embedding_VD.dtype
        with autocast(features_MF.device, dtype):
            context_MD = self.drafter.context(features_MF).to(dtype)
            rope_ME = self._rope(len(context_MD))
            for kept in self._layers:
                own = kept.layer.self_attn.keys_and_values(context_MD, rope_ME)
                kept.key_GTE, kept.value_GTE = kept.and_then(*own)
        self.length += len(context_MD)

    @torch.no_grad()
    def logits(self, anchor: int) -> Tensor:
        """Logits [S, V] of the tokens after the anchor, which is that token."""
        config, embedding_VD = self.drafter.config, self.head.embedding_VD
        input_B = torch.full((config.block_size,), config.mask_token_id, device=embedding_VD.device)
        input_B[0] = anchor
        hidden_BD = embedding_VD[input_B]
        with autocast(hidden_BD.device, hidden_BD.dtype):
            rope_BE = self._rope(config.block_size)
            for i, kept in enumerate(self._layers):
                hidden_BD = kept.drafted(hidden_BD, rope_BE, self._mask(config.window(i)))
            hidden_BD = self.drafter.norm(hidden_BD)
        return hidden_BD[1:] @ self.head.head_VD.T

    def _rope(self, count: int) -> Rope:
        embedding_VD = self.head.embedding_VD
        position_M = self.length + torch.arange(count, device=embedding_VD.device)
        return Rope.at(position_M, self.drafter.config, embedding_VD.dtype)

    def _mask(self, window: int) -> Tensor | None:
        """`block_mask` [B, T + B] of the block that comes next; None where a slot sees all."""
        if not window:
            return None
        device = self.head.embedding_VD.device
        document_T = torch.zeros(self.length + 1, dtype=torch.long, device=device)  # the anchor too
        anchor_1 = torch.tensor([self.length], device=device)
        mask = block_mask(document_T, anchor_1, self.drafter.config.block_size, window)
        return torch.cat([mask[:, : self.length], mask[:, self.length + 1 :]], dim=1)


@dataclass
class _Kept:
    """A layer, and the keys and values that it has of the text."""

    layer: DraftLayer
    key_GTE: Tensor
    value_GTE: Tensor

    def and_then(self, key_GME: Tensor, value_GME: Tensor) -> tuple[Tensor, Tensor]:
        """What it has, followed by more."""
        key_GTE = torch.cat([self.key_GTE, key_GME], dim=1)
        return key_GTE, torch.cat([self.value_GTE, value_GME], dim=1)

    def drafted(self, hidden_BD: Tensor, rope_BE: Rope, mask: Tensor | None) -> Tensor:
        """The layer's output for a block that follows the text."""
        query_HBE, *own = self.layer.before_attention(hidden_BD, hidden_BD[:0], rope_BE)
        key_GKE, value_GKE = self.and_then(*own)
        out_1HBE = F.scaled_dot_product_attention(
            query_HBE[None], key_GKE[None], value_GKE[None], attn_mask=mask, enable_gqa=True
        )
        return self.layer.after_attention(hidden_BD, out_1HBE[0])
