"""What a drafter has read of a growing text, kept from one draft to the next.

T tokens read before, M new ones, B slots of a block, of which S = B - 1 are drafted, J = M + B,
K = T + J keys, D hidden size, F = captured layers x D, E head size, V vocabulary. H query heads
share G key heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.anchors import block_inputs
from dflash.attention import block_mask
from dflash.drafter import Drafter, autocast
from dflash.layers import DraftLayer, Rope
from dflash.target import FrozenHead


class DraftContext:
    """Each layer's keys and values of one text, so that a draft reads only what is new of it."""

    def __init__(self, drafter: Drafter, head: FrozenHead) -> None:
        self.drafter, self.head, self.length = drafter, head, 0
        config = drafter.config
        nothing_GTE = head.embedding_VD.new_empty(config.num_key_value_heads, 0, config.head_dim)
        self._kept = dict.fromkeys(drafter.layers, (nothing_GTE, nothing_GTE))

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
        anchor_1 = torch.full((1,), anchor, device=device)
        (input_B,) = block_inputs(anchor_1, config.block_size, config.mask_token_id)
        position_J = self.length + torch.arange(len(features_MF) + len(input_B), device=device)
        rope_JE = Rope.at(position_J, config, dtype)
        context_MD = read_context(self.drafter, self.head, features_MF)
        self.length += len(features_MF)
        with autocast(device, dtype):
            hidden_BD = self.drafter.through_layers(
                self._layer, embedding_VD[input_B], context_MD, rope_JE, self._mask
            )
        return hidden_BD[1:] @ self.head.head_VD.T

    def _layer(
        self,
        layer: DraftLayer,
        hidden_BD: Tensor,
        context_MD: Tensor,
        rope_JE: Rope,
        mask: Tensor | None,
    ) -> Tensor:
        """A layer of which the block sees what is kept, what is new, and itself; keeps the new."""
        query_HBE, key_GJE, value_GJE = layer.before_attention(hidden_BD, context_MD, rope_JE)
        key_GTE, value_GTE = self._kept[layer]
        key_GKE = torch.cat([key_GTE, key_GJE], dim=1)
        value_GKE = torch.cat([value_GTE, value_GJE], dim=1)
        self._kept[layer] = key_GKE[:, : self.length], value_GKE[:, : self.length]
        out_1HBE = F.scaled_dot_product_attention(
            query_HBE[None], key_GKE[None], value_GKE[None], attn_mask=mask, enable_gqa=True
        )
        return layer.after_attention(hidden_BD, out_1HBE[0])

    def _mask(self, window: int) -> Tensor | None:
        """`block_mask` of the block after all that was read, [B, K]; None: it sees all."""
        if not window:
            return None
        device = self.head.embedding_VD.device
        document_T = torch.zeros(self.length + 1, dtype=torch.long, device=device)  # the anchor too
        anchor_1 = torch.tensor([self.length], device=device)
        mask = block_mask(document_T, anchor_1, self.drafter.config.block_size, window)
        return torch.cat([mask[:, : self.length], mask[:, self.length + 1 :]], dim=1)


@torch.no_grad()
def read_context(drafter: Drafter, head: FrozenHead, features_TF: Tensor) -> Tensor:
    """What the drafter's layers read of each token, [T, D], in the head's dtype, as in training."""
    with autocast(features_TF.device, head.embedding_VD.dtype):
        return drafter.context(features_TF).to(head.embedding_VD.dtype)
