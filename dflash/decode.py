"""Speculative decoding with a DFlash drafter: acceptance length by replay and for real.

tau, the acceptance length, is the mean number of tokens that one verification pass of the target
yields: the accepted ones and the target's own next one. T context tokens, N anchors, B slots.
"""

import inspect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash.data.completions import Completion
from dflash.drafter import Drafter
from dflash.target import FrozenHead, Target

# Blocks drafted in one pass of a replay: bounds the mask and the logits.
BLOCKS_PER_PASS = 64


@dataclass(frozen=True)
class Decoded:
    """One prompt's continuation, and the tokens that each verification step yielded.

    The first token comes from the prefill, not from a step. A step cut short by the end of the
    text counts with what was used of it.
    """

    tokens: list[int]
    steps: list[int]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step; 1.0 when there was no step."""
        return statistics.fmean(self.steps) if self.steps else 1.0


def acceptance_length(decoded: Sequence[Decoded]) -> float:
    """tau: the mean over prompts of each prompt's mean."""
    return statistics.fmean(one.acceptance_length for one in decoded)


@torch.no_grad()
def replay(target: Target, drafter: Drafter, head: FrozenHead, done: Completion) -> Decoded:
    """What greedy speculative decoding would yield, without decoding.

    `done` must be the target's own greedy completion: then every verification is known beforehand.
    One target pass, and drafts for every position at once.
    """
    tokens_T = torch.tensor(done.input_ids, device=target.device)
    features_TF, _ = target.hidden(tokens_T, [len(tokens_T)], final=False)
    first = done.prompt_length
    anchors = torch.arange(first, len(tokens_T) - 1, device=target.device)
    drafts: list[list[int]] = []
    for anchor_N in anchors.split(BLOCKS_PER_PASS) if len(anchors) else ():
        drafts += propose(drafter, head, features_TF, tokens_T, anchor_N).tolist()
    tokens = list(done.input_ids)
    return Decoded(tokens[first:], _walk(tokens, drafts, first))


def _walk(tokens: list[int], drafts: list[list[int]], first: int) -> list[int]:
    """Tokens that each step yields when the drafts are verified against `tokens`."""
    steps: list[int] = []
    anchor = first
    while anchor < len(tokens) - 1:
        rest = tokens[anchor + 1 :]
        steps.append(min(agreeing(drafts[anchor - first], rest) + 1, len(rest)))
        anchor += steps[-1]
    return steps


def agreeing(draft: Sequence[int], truth: Sequence[int]) -> int:
    """How many leading tokens of the draft are right."""
    wrong = (i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b)
    return next(wrong, min(len(draft), len(truth)))


@torch.no_grad()
def propose(
    drafter: Drafter, head: FrozenHead, features_TF: Tensor, tokens_T: Tensor, anchor_N: Tensor
) -> Tensor:
    """Greedy drafts [N, B - 1] of the tokens after each anchor of one document.

    `features_TF` may hold fewer tokens than `tokens_T`: those before the (only) anchor.
    """
    config = drafter.config
    inputs_NB = tokens_T.new_full((len(anchor_N), config.block_size), config.mask_token_id)
    inputs_NB[:, 0] = tokens_T[anchor_N]
    position_T = torch.arange(len(tokens_T), device=tokens_T.device)
    padding = features_TF.new_zeros(len(tokens_T) - len(features_TF), features_TF.shape[1])
    hidden_PD = drafter(
        head.embedding_VD[inputs_NB.flatten()],
        torch.cat([features_TF, padding]),
        torch.zeros_like(position_T),
        position_T,
        anchor_N,
    )
    # One flat product: a strided [N, B - 1, D] operand makes it N small ones: four times slower.
    asked = hidden_PD.unflatten(0, inputs_NB.shape)[:, 1:].flatten(0, 1)
    return (asked @ head.head_VD.T).argmax(-1).view(len(anchor_N), -1)


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    head: FrozenHead,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
) -> Decoded:
    """Decode greedily, `block_size` tokens to each verification pass of the target."""
    verifier = Verifier(target)
    logits_NV = verifier.extend(prompt)
    tokens, steps = [*prompt, int(logits_NV[-1].argmax())], []
    end = len(prompt) + max_new_tokens
    while len(tokens) < end and tokens[-1] not in eos_token_ids:
        tokens_T = torch.tensor(tokens, device=target.device)
        last_N = torch.tensor([len(tokens) - 1], device=target.device)
        draft_ids = propose(drafter, head, verifier.features_TF, tokens_T, last_N)[0].tolist()
        answers = verifier.extend([tokens[-1], *draft_ids]).argmax(-1).tolist()
        accepted = agreeing(draft_ids, answers)
        verifier.keep(len(tokens) + accepted)
        new = _until_end([*draft_ids[:accepted], answers[accepted]], eos_token_ids)
        new = new[: end - len(tokens)]
        tokens += new
        steps.append(len(new))
    return Decoded(tokens[len(prompt) :], steps)


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = (i for i, token in enumerate(tokens) if token in eos_token_ids)
    return tokens[: next(ends, len(tokens)) + 1]


class Verifier:
    """The target over a growing sequence whose tail can be taken back.

    Keeps a cache where the target's layers allow to cut it; a recurrent state cannot be rolled
    back, so that such a target runs over the whole sequence each time.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tokens: list[int] = []
        self._cache = DynamicCache() if _can_roll_back(target) else None
        self.features_TF = torch.empty(0)
        """Captured hidden states of all tokens that are kept."""

    def extend(self, tokens: Sequence[int]) -> Tensor:
        """Add tokens; returns the logits after each of them, [len(tokens), V]."""
        self._tokens += tokens
        given = tokens if self._cache is not None else self._tokens
        ids = torch.tensor([list(given)], device=self._target.device)
        with self._target.capturing() as captured:
            out = self._target.model(input_ids=ids, **_cache_options(self._target, self._cache))
        features_TF = torch.cat([hidden[0] for hidden in captured], dim=-1)
        kept = len(self._tokens) - len(given)
        self.features_TF = torch.cat([self.features_TF[:kept].to(features_TF), features_TF])
        return out.logits[0, -len(tokens) :]

    def keep(self, count: int) -> None:
        """Forget all tokens after the first `count`."""
        surplus = len(self._tokens) - count
        del self._tokens[count:]
        self.features_TF = self.features_TF[:count]
        if self._cache is not None and surplus:
            # Negative: how many to remove; from transformers 5.24 on nothing else is taken.
            self._cache.crop(-surplus)


def _can_roll_back(target: Target) -> bool:
    if getattr(target.model, "_is_stateful", False):
        return False
    kinds = getattr(target.text_config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"}


def _cache_options(target: Target, cache: DynamicCache | None) -> dict[str, Any]:
    if cache is None:
        return {"use_cache": False}
    # transformers 5.24 knows past_key_values as cache, too; 5.40 forgets the old name.
    parameters = inspect.signature(target.model.forward).parameters
    return {"use_cache": True, "cache" if "cache" in parameters else "past_key_values": cache}


@dataclass(frozen=True)
class Divergence:
    """Where a decoded text first differs from the target's own, and how near the choice was."""

    index: int
    top2_gap: float


@torch.no_grad()
def divergence(
    target: Target, prompt: Sequence[int], decoded: Sequence[int], greedy: Sequence[int]
) -> Divergence | None:
    """None when `decoded` is the target's greedy text, token for token (losslessness).

    In float32 it must be. In bfloat16 a one-token and a block pass round differently: then the gap
    between the target's two best logits at the first difference tells a tie from a mistake.
    """
    same = agreeing(decoded, greedy)
    if same == len(decoded) == len(greedy):
        return None
    logits_NV = Verifier(target).extend([*prompt, *greedy[:same]])
    best = logits_NV[-1].float().topk(2).values
    return Divergence(same, float(best[0] - best[1]))
