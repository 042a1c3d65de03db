"""Who may see whom in a draft pass, and attention under that mask.

Queries are P = N x B draft slots; keys are T context tokens followed by the same P draft slots.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def block_mask(document_T: Tensor, anchor_N: Tensor, block_size: int, window: int = 0) -> Tensor:
    """Dense mask, True = visible, of shape [P, T + P].

    A slot sees the context of its own document strictly before its anchor, and its own block, both
    ways. A slot that sees another block finds its own label there: a wonderful loss and a terrible
    acceptance length (SpecForge#470).

    Args:
        window: 0 for full attention, else a sliding-window layer: a slot sees only keys fewer than
            `window` positions back, and its own block causally.
    """
    context_PT = _context_mask(document_T, anchor_N, block_size, window)
    return torch.cat([context_PT, _own_block_mask(anchor_N, block_size, window)], dim=1)


def _context_mask(document_T: Tensor, anchor_N: Tensor, block_size: int, window: int) -> Tensor:
    token_T = torch.arange(len(document_T), device=document_T.device)
    same_NT = document_T[anchor_N][:, None] == document_T
    visible_NT = same_NT & (token_T < anchor_N[:, None])
    if not window:
        return visible_NT.repeat_interleave(block_size, dim=0)
    slot_B = torch.arange(block_size, device=anchor_N.device)
    distance_NBT = (anchor_N[:, None] + slot_B)[:, :, None] - token_T
    return (visible_NT[:, None] & (distance_NBT < window)).flatten(0, 1)


def _own_block_mask(anchor_N: Tensor, block_size: int, window: int) -> Tensor:
    slot_P = torch.arange(len(anchor_N) * block_size, device=anchor_N.device)
    block_P = slot_P // block_size
    own_PP = block_P[:, None] == block_P
    if not window:
        return own_PP
    distance_PP = slot_P[:, None] - slot_P
    return own_PP & (distance_PP >= 0) & (distance_PP < window)


@dataclass(frozen=True)
class DocumentMask:
    """The part of the mask that one document's drafts need: all else is False anyway.

    Attributes:
        context, drafts: where the document lies among the T tokens and among the P slots.
        mask: block_mask of this document alone, [its slots, its tokens + its slots].
    """

    context: slice
    drafts: slice
    mask: Tensor


def document_masks(
    document_T: Tensor, anchor_N: Tensor, block_size: int, window: int = 0
) -> list[DocumentMask]:
    """`block_mask`, document by document: documents and anchors must both be in ascending order.

    Work grows with the sum of the documents' squares instead of the square of their sum.
    """
    ids, tokens = (t.tolist() for t in document_T.unique_consecutive(return_counts=True))
    drafts = document_T[anchor_N].bincount(minlength=max(ids, default=0) + 1).tolist()
    masks, token, block = [], 0, 0
    for document, length in zip(ids, tokens, strict=True):
        if count := drafts[document]:
            anchors = anchor_N[block : block + count] - token
            alone = block_mask(document_T[token : token + length], anchors, block_size, window)
            slots = slice(block * block_size, (block + count) * block_size)
            masks.append(DocumentMask(slice(token, token + length), slots, alone))
        token, block = token + length, block + count
    return masks


def attend(
    query_HPE: Tensor, key_GKE: Tensor, value_GKE: Tensor, masks: list[DocumentMask]
) -> Tensor:
    """Scaled dot-product attention; H query heads share G key heads. Returns [H, P, E].

    Dense masks are the CPU path (FlexAttention has no backward there) and the oracle of others.
    """
    context_length = key_GKE.shape[1] - query_HPE.shape[1]
    contexts = (key_GKE[:, :context_length], value_GKE[:, :context_length])
    drafts = (key_GKE[:, context_length:], value_GKE[:, context_length:])
    outs = []
    for part in masks:
        key_1GKE, value_1GKE = (
            torch.cat([context[:, part.context], draft[:, part.drafts]], dim=1)[None]
            for context, draft in zip(contexts, drafts, strict=True)
        )
        query_1HPE = query_HPE[None, :, part.drafts]
        outs.append(
            F.scaled_dot_product_attention(
                query_1HPE, key_1GKE, value_1GKE, attn_mask=part.mask, enable_gqa=True
            )[0]
        )
    return torch.cat(outs, dim=1)
