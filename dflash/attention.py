"""Who may see whom in a draft pass, and attention under that mask.

Queries are P = N x B draft slots; keys are T context tokens followed by the same P draft slots.
H query heads share G key heads; E is the head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
"""Slots and keys of one tile of FlexAttention's mask."""


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
    """Scaled dot-product attention under `document_masks`. Returns [H, P, E].

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


def tiled_mask(document_T: Tensor, anchor_N: Tensor, block_size: int, window: int = 0) -> BlockMask:
    """`block_mask` for FlexAttention, tile by tile and without the dense mask.

    Documents and anchors must both be in ascending order, T and P multiples of TILE. A tile is
    listed as full only where every pair in it is visible; of the others FlexAttention asks each
    pair. The work is that of the tiles, (P / TILE) x ((T + P) / TILE), in a handful of kernels.
    """
    context, slots = len(document_T), len(anchor_N) * block_size
    if context % TILE or slots % TILE:
        raise ValueError(f"{context} tokens and {slots} slots: must be multiples of {TILE}")
    first_N = torch.searchsorted(document_T, document_T[anchor_N])

    def visible(_batch: Tensor, _head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        block = slot // block_size
        anchor = anchor_N[block]
        seen = (key >= first_N[block]) & (key < anchor)
        own = (key >= context) & ((key - context) // block_size == block)
        if window:
            seen = seen & (anchor + slot % block_size - key < window)
            own = own & (slot + context >= key) & (slot + context - key < window)
        return seen | own

    any_QK, all_QK = _context_tiles(first_N, anchor_N, block_size, window, context)
    own_QQ = _own_block_tiles(slots, block_size, anchor_N.device)
    partial_QK = torch.cat([any_QK & ~all_QK, own_QQ], dim=1)
    full_QK = torch.cat([all_QK, torch.zeros_like(own_QQ)], dim=1)
    return BlockMask.from_kv_blocks(
        *_listed(partial_QK),
        *_listed(full_QK),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(slots, context + slots),
    )


def attend_tiled(query_HPE: Tensor, key_GKE: Tensor, value_GKE: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention under `tiled_mask`; to be compiled. Returns [H, P, E].

    A key head is copied for each of its query heads: in the backward one program would else go
    through all of them, for a tile of keys that every slot sees, while others have long ended.
    """
    group = len(query_HPE) // len(key_GKE)
    key_HKE, value_HKE = (x.repeat_interleave(group, dim=0) for x in (key_GKE, value_GKE))
    out = flex_attention(query_HPE[None], key_HKE[None], value_HKE[None], block_mask=mask)
    assert isinstance(out, Tensor)  # a tuple only where more was asked for
    return out[0]


def _context_tiles(
    first_N: Tensor, anchor_N: Tensor, block_size: int, window: int, context: int
) -> tuple[Tensor, Tensor]:
    """Context tiles of which a tile of slots sees something, and those it sees all of: [Q, K].

    A slot sees the keys from `low` up to but without its anchor.
    """
    low_P = first_N.repeat_interleave(block_size)
    anchor_P = anchor_N.repeat_interleave(block_size)
    if window:
        slot_P = torch.arange(len(low_P), device=low_P.device) % block_size
        low_P = torch.maximum(low_P, anchor_P + slot_P - window + 1)
    low_QS, high_QS = low_P.view(-1, TILE), anchor_P.view(-1, TILE)
    start_K = torch.arange(0, context, TILE, device=low_P.device)
    end_K = start_K + TILE
    some_QK = (end_K > low_QS.amin(1, True)) & (start_K < high_QS.amax(1, True))
    all_QK = (start_K >= low_QS.amax(1, True)) & (end_K <= high_QS.amin(1, True))
    return some_QK, all_QK


def _own_block_tiles(slots: int, block_size: int, device: torch.device) -> Tensor:
    """Which tiles of slots have a block in common, [Q, Q]: neighbours where a block straddles."""
    start_Q = torch.arange(0, slots, TILE, device=device)
    first_Q, last_Q = start_Q // block_size, (start_Q + TILE - 1) // block_size
    return (first_Q[:, None] <= last_Q) & (last_Q[:, None] >= first_Q)


def _listed(tiles_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles each row has, and which, those first; with batch and head dimensions."""
    count_Q = tiles_QK.sum(1, dtype=torch.int32)
    index_QK = tiles_QK.byte().argsort(dim=1, descending=True, stable=True).int()
    return count_Q[None, None], index_QK[None, None]
