"""Speculative decoding with a DFlash drafter: acceptance length by replay and for real.

tau, the acceptance length, is the mean number of tokens that one verification pass of the target
yields: the accepted ones and the target's own next one. T context tokens, N anchors, B slots, of
which S = B - 1 are drafted, V vocabulary.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.anchors import block_inputs
from dflash.data.completions import Completion
from dflash.draft_context import DraftContext, read_context
from dflash.drafter import Drafter, autocast
from dflash.target import FrozenHead, Target
from dflash.tree import Candidates, DraftTree
from dflash.verify import Verifier

# Blocks drafted in one pass of a replay: bounds the mask and the logits.
BLOCKS_PER_PASS = 64
# No token: what follows the end of a text.
NOTHING = -1


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


@dataclass(frozen=True)
class Step:
    """One pass of the target: the tokens that it yielded, and the draft that it verified.

    `tree` is None for the prefill; its anchor is token `anchor` of prompt and text.
    """

    tokens: list[int]
    anchor: int
    tree: DraftTree | None


def acceptance_length(decoded: Sequence[Decoded]) -> float:
    """tau: the mean over prompts of each prompt's mean."""
    return statistics.fmean(one.acceptance_length for one in decoded)


def replay(
    target: Target, drafter: Drafter, head: FrozenHead, done: Completion, *, tree_nodes: int = 0
) -> Decoded:
    """What greedy speculative decoding would yield, without decoding; see `replays`."""
    return replays(target, drafter, head, done, [tree_nodes])[tree_nodes]


@torch.no_grad()
def replays(
    target: Target, drafter: Drafter, head: FrozenHead, done: Completion, budgets: Sequence[int]
) -> dict[int, Decoded]:
    """What greedy speculative decoding would yield with each budget, without decoding.

    `done` must be the target's own greedy completion: then every verification is known beforehand.
    One target pass, and one drafter pass for every position at once, whatever the budgets are.
    `head` is on the drafter's device. Of the budgets 0 is a chain; see `drafts`.
    """
    device = head.embedding_VD.device
    tokens_T = torch.tensor(done.input_ids, device=device)
    features_TF = target.hidden(tokens_T, [len(tokens_T)], final=False)[0].to(device)
    context_TD = read_context(drafter, head, features_TF)
    first = done.prompt_length
    anchors = torch.arange(first, len(tokens_T) - 1, device=device)
    trees: dict[int, list[DraftTree]] = {nodes: [] for nodes in budgets}
    for anchor_N in anchors.split(BLOCKS_PER_PASS) if len(anchors) else ():
        logits_NSV = draft_logits(drafter, head, context_TD, tokens_T, anchor_N)
        for nodes, some in drafts(logits_NSV, tokens_T[anchor_N].tolist(), budgets).items():
            trees[nodes] += some
    tokens = list(done.input_ids)
    return {nodes: Decoded(tokens[first:], _walk(tokens, trees[nodes], first)) for nodes in budgets}


def _walk(tokens: list[int], trees: list[DraftTree], first: int) -> list[int]:
    """Tokens that each step yields when the drafts are verified against `tokens`."""
    steps: list[int] = []
    anchor = first
    while anchor < len(tokens) - 1:
        tree, rest = trees[anchor - first], tokens[anchor + 1 :]
        answers = [rest[depth] if depth < len(rest) else NOTHING for depth in tree.depths]
        steps.append(min(len(tree.path(answers)) + 1, len(rest)))
        anchor += steps[-1]
    return steps


def drafts(
    logits_NSV: Tensor, anchors: Sequence[int], budgets: Sequence[int]
) -> dict[int, list[DraftTree]]:
    """For each budget a draft after each anchor token: 0 a chain, else a tree of so many nodes."""
    found: dict[int, list[DraftTree]] = {}
    if 0 in budgets:
        chains = zip(anchors, logits_NSV.argmax(-1).tolist(), strict=True)
        found[0] = [DraftTree.chain(*pair) for pair in chains]
    if most := max(budgets):
        best = logits_NSV.float().log_softmax(-1).topk(min(most, logits_NSV.shape[-1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        slots = [list(map(Candidates, ids, log_probs)) for ids, log_probs in rows]
        for nodes in filter(None, budgets):
            pairs = zip(anchors, slots, strict=True)
            found[nodes] = [DraftTree.best_first(anchor, one, nodes) for anchor, one in pairs]
    return found


@torch.no_grad()
def draft_logits(
    drafter: Drafter, head: FrozenHead, context_TD: Tensor, tokens_T: Tensor, anchor_N: Tensor
) -> Tensor:
    """Logits [N, S, V] of the tokens after each anchor of one document.

    The drafter's float32 weights compute in the head's dtype, as in training.
    """
    config = drafter.config
    inputs_NB = block_inputs(tokens_T[anchor_N], config.block_size, config.mask_token_id)
    position_T = torch.arange(len(tokens_T), device=tokens_T.device)
    with autocast(tokens_T.device, head.embedding_VD.dtype):
        hidden_PD = drafter.draft(
            head.embedding_VD[inputs_NB.flatten()],
            context_TD,
            torch.zeros_like(position_T),
            position_T,
            anchor_N,
        )
    # One flat product: a strided [N, S, D] operand makes it N small ones: four times slower.
    asked = hidden_PD.unflatten(0, inputs_NB.shape)[:, 1:].flatten(0, 1)
    return (asked @ head.head_VD.T).unflatten(0, (len(anchor_N), -1))


@torch.no_grad()
def decode_steps(
    target: Target,
    drafter: Drafter,
    head: FrozenHead,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    tree_nodes: int = 0,
) -> Iterator[Step]:
    """Decode greedily, one draft to each verification pass of the target, as the passes are done.

    The text is the target's own, whatever the drafts are: they only decide how many passes it
    takes. `tree_nodes`: 0 drafts a chain of the block's slots, else a tree of that many nodes.
    """
    verifier = Verifier(target)
    logits_MV = verifier.extend(prompt)
    tokens = [*prompt, int(logits_MV[-1].argmax())]
    yield Step(tokens[-1:], len(prompt) - 1, None)
    device, end = head.embedding_VD.device, len(prompt) + max_new_tokens
    context = DraftContext(drafter, head)
    while len(tokens) < end and tokens[-1] not in eos_token_ids:
        anchor = len(tokens) - 1
        # What was read before stays: only tokens that were never kept are taken back.
        logits_SV = context.draft(verifier.features_TF[context.length :].to(device), tokens[anchor])
        (tree,) = drafts(logits_SV[None], tokens[anchor:], [tree_nodes])[tree_nodes]
        answers = verifier.extend_by_tree(tree).argmax(-1).tolist()
        path = tree.path(answers)
        verifier.accept(tree, path)
        last = path[-1] if path else 0
        new = _until_end([*(tree.tokens[node] for node in path), answers[last]], eos_token_ids)
        new = new[: end - len(tokens)]
        tokens += new
        yield Step(new, anchor, tree)


def speculate(
    target: Target,
    drafter: Drafter,
    head: FrozenHead,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    tree_nodes: int = 0,
) -> Decoded:
    """The whole continuation of a prompt; see `decode_steps`."""
    steps = decode_steps(
        target,
        drafter,
        head,
        prompt,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
        tree_nodes=tree_nodes,
    )
    return decoded_from(steps)


def decoded_from(steps: Iterator[Step] | Sequence[Step]) -> Decoded:
    """The text that the steps make up, and what each verification pass yielded."""
    prefill, *verified = steps
    tokens = [token for step in (prefill, *verified) for token in step.tokens]
    return Decoded(tokens, [len(step.tokens) for step in verified])


@torch.no_grad()
def decode_plainly(
    target: Target, prompt: Sequence[int], *, max_new_tokens: int, eos_token_ids: Sequence[int]
) -> list[int]:
    """The target's own greedy continuation, one token to each pass: what speculation must equal."""
    verifier = Verifier(target, capture=False)
    new = [int(verifier.extend(prompt)[-1].argmax())]
    while len(new) < max_new_tokens and new[-1] not in eos_token_ids:
        new.append(int(verifier.extend(new[-1:])[-1].argmax()))
    return new


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = (i for i, token in enumerate(tokens) if token in eos_token_ids)
    return tokens[: next(ends, len(tokens)) + 1]
