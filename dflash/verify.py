"""The target's side of speculative decoding: verification passes, and what losslessness means.

T tokens so far, M tokens of a pass, V vocabulary.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.errors import ModelError
from dflash.target import Target
from dflash.tree import DraftTree


class Verifier:
    """The target over a growing sequence whose tail can be taken back.

    Keeps a cache where the target's layers allow to cut it; a recurrent state cannot be rolled
    back, so that such a target runs over the whole sequence each time.
    """

    def __init__(self, target: Target, *, capture: bool = True) -> None:
        self._target = target
        self._capture = capture
        self._tokens: list[int] = []
        self._cache = DynamicCache() if target.keeps_all_keys else None
        self.features_TF = torch.empty(0)
        """Captured hidden states of all tokens that are kept; nothing without `capture`."""

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Add tokens; returns the logits after each of them, [M, V]."""
        return self._pass(tokens)

    def extend_by_tree(self, tree: DraftTree) -> Tensor:
        """Add all nodes of a tree in one pass; returns the logits after each node, [M, V].

        Raises ModelError for a tree that branches, where the target cannot be masked or cut.
        """
        if tree.is_chain:
            return self._pass(tree.tokens)
        require_tree_mask(self._target)
        before, device = len(self._tokens), self._target.device
        seen_MK = torch.cat(
            [torch.ones(len(tree.tokens), before, dtype=torch.bool), tree.visible_MM()], dim=1
        )
        dtype = self._target.model.dtype
        # Added to the scores rather than boolean: eager attention takes no other mask.
        mask_MK = torch.zeros(seen_MK.shape, dtype=dtype).masked_fill(
            ~seen_MK, torch.finfo(dtype).min
        )
        position_M = before + torch.tensor(tree.depths)
        return self._pass(
            tree.tokens,
            attention_mask=mask_MK[None, None].to(device),
            position_ids=position_M[None].to(device),
        )

    def accept(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Of the tree that was added last, keep the anchor and the nodes of `path` only."""
        start = len(self._tokens) - len(tree.tokens)
        kept = [*range(start), start, *(start + node for node in path)]
        if kept == list(range(len(kept))):
            return self.keep(len(kept))
        row_T = torch.tensor(kept, device=self._target.device)
        self._tokens = [self._tokens[i] for i in kept]
        self.features_TF = self.features_TF[row_T]
        layers: Any = self._cache.layers if self._cache is not None else ()
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, row_T], layer.values[:, :, row_T]

    def keep(self, count: int) -> None:
        """Forget all tokens after the first `count`."""
        surplus = len(self._tokens) - count
        del self._tokens[count:]
        self.features_TF = self.features_TF[:count]
        if self._cache is not None and surplus:
            # Negative: how many to remove; from transformers 5.24 on nothing else is taken.
            self._cache.crop(-surplus)

    def _pass(self, tokens: Sequence[int], **masks: Tensor) -> Tensor:
        self._tokens += tokens
        given = tokens if self._cache is not None else self._tokens
        options = {**_cache_options(self._target, self._cache), **masks}
        ids = torch.tensor([list(given)], device=self._target.device)
        if not self._capture:
            return self._target.model(input_ids=ids, **options).logits[0, -len(tokens) :]
        with self._target.capturing() as captured:
            out = self._target.model(input_ids=ids, **options)
        features_TF = torch.cat([hidden[0] for hidden in captured], dim=-1)
        kept = len(self._tokens) - len(given)
        self.features_TF = torch.cat([self.features_TF[:kept].to(features_TF), features_TF])
        return out.logits[0, -len(tokens) :]


def require_tree_mask(target: Target) -> None:
    """Raise ModelError unless a pass over this target can be masked as a tree and cut to a path."""
    attention = getattr(target.model.config, "_attn_implementation", "eager")
    if not target.has_full_attention or attention not in ("sdpa", "eager"):
        raise ModelError(
            f"{type(target.model).__name__} with {attention} attention: a draft tree needs full "
            "attention in every layer, by sdpa or eager",
            remedy="leave out --tree-nodes: the plain draft works with every target",
        )


def _cache_options(target: Target, cache: DynamicCache | None) -> dict[str, Any]:
    if cache is None:
        return {"use_cache": False}
    # transformers 5.24 knows past_key_values as cache, too; 5.40 forgets the old name.
    parameters = inspect.signature(target.model.forward).parameters
    return {"use_cache": True, "cache" if "cache" in parameters else "past_key_values": cache}


@dataclass(frozen=True)
class Divergence:
    """Where a decoded text first differs from the target's own, and how near the choice was.

    `gap`: how far the lower of the two texts' tokens lies below the target's best logit; infinite
    where one of the texts had ended.
    """

    index: int
    gap: float


@torch.no_grad()
def divergence(
    target: Target, prompt: Sequence[int], decoded: Sequence[int], greedy: Sequence[int]
) -> Divergence | None:
    """None when `decoded` is the target's greedy text, token for token (losslessness).

    In float32 it must be. In bfloat16 a one-token and a block pass round differently: then the gap
    between the two tokens' logits at the first difference tells a tie from a mistake.
    """
    same = agreeing(decoded, greedy)
    if same == len(decoded) == len(greedy):
        return None
    if same in (len(decoded), len(greedy)):
        return Divergence(same, math.inf)
    logits_V = Verifier(target, capture=False).extend([*prompt, *greedy[:same]])[-1].float()
    chosen = torch.stack([logits_V[decoded[same]], logits_V[greedy[same]]])
    return Divergence(same, float(logits_V.max() - chosen.min()))


def agreeing(some: Sequence[int], others: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    wrong = (i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b)
    return next(wrong, min(len(some), len(others)))
