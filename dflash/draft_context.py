"""What a drafter has read of a growing text, kept from one draft to the next.

T tokens read before, M new ones, B slots of a block, of which S = B - 1 are drafted, J = M + B,
K = T + J keys, D hidden size, F = captured layers x D, E head size, V vocabulary. H query heads
share G key heads.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.attention import block_mask
from dflash.drafter import Drafter, autocast
from dflash.layers import Rope
from dflash.target import FrozenHead


class DraftContext:
    """Each layer's keys and values of one text, so that a draft reads only what is new of it."""

    def __init__(self, drafter: Drafter, head: FrozenHead) -> None:
        self.drafter, self.head, self.length = drafter, head, 0
        config = drafter.config
        nothing_GTE = head.embedding_VD.new_empty(config.num_key_value_heads, 0, config.head_dim)
        self._kept = [(nothing_GTE, nothing_GTE)] * config.num_layers

    @torch.no_grad()
    def draft(self, features_MF: Tensor, anchor: int) -> Tensor:
        """Logits [S, V] of the tokens after the anchor, as `decode.draft_logits` computes them.

        Args:
            features_MF: the target's captured hidden states of those tokens before the anchor that
                were not read yet.
            anchor: the token that follows all that were read.
        """
        config, embedding_VD = self.drafter.config, self.head.embedding_VD
        device, dtype = embedding_VD.device, embedding_VD.dtype
        input_B = torch.full((config.block_size,), config.mask_token_id, device=device)
        input_B[0] = anchor
        position_J = self.length + torch.arange(len(features_MF) + len(input_B), device=device)
        self.length += len(features_MF)
        hidden_BD = embedding_VD[input_B]
        with autocast(device, dtype):
            rope_JE = Rope.at(position_J, config, dtype)
            context_MD = self.drafter.context(features_MF).to(dtype)
            for i, layer in enumerate(self.drafter.layers):
                mask = self._mask(config.window(i))
                attend = partial(self._attend, i)
                hidden_BD = layer(hidden_BD, context_MD, rope_JE, mask, attend)
            hidden_BD = self.drafter.norm(hidden_BD)
        return hidden_BD[1:] @ self.head.head_VD.T

    def _attend(
        self, layer: int, query_HBE: Tensor, key_GJE: Tensor, value_GJE: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The block reads what is kept, what is new, and itself; what is new is kept.

        The J keys and values given are those of what is new, then of the block.
        """
        key_GTE, value_GTE = self._kept[layer]
        key_GKE = torch.cat([key_GTE, key_GJE], dim=1)
        value_GKE = torch.cat([value_GTE, value_GJE], dim=1)
        self._kept[layer] = key_GKE[:, : self.length], value_GKE[:, : self.length]
        return F.scaled_dot_product_attention(
            query_HBE[None], key_GKE[None], value_GKE[None], attn_mask=mask, enable_gqa=True
        )[0]

    def _mask(self, window: int) -> Tensor | None:
        """`block_mask` of the block after all that was read, [B, K]; None: it sees all."""
        if not window:
            return None
        device = self.head.embedding_VD.device
        document_T = torch.zeros(self.length + 1, dtype=torch.long, device=device)  # the anchor too
        anchor_1 = torch.tensor([self.length], device=device)
        mask = block_mask(document_T, anchor_1, self.drafter.config.block_size, window)
        return torch.cat([mask[:, : self.length], mask[:, self.length + 1 :]], dim=1)
