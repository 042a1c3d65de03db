"""Speculative decoding: the target's own text, and the same tau replayed as decoded."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from dflash import decode, verify
from dflash.anchors import make_blocks
from dflash.asked import AskedSlots
from dflash.batches import pack
from dflash.data.completions import Completion
from dflash.decode import (
    Decoded,
    acceptance_length,
    decode_plainly,
    draft_logits,
    replay,
    speculate,
)
from dflash.draft_context import DraftContext, read_context
from dflash.drafter import build_drafter
from dflash.drafter_config import drafter_config
from dflash.errors import ModelError
from dflash.losses import Objective, block_losses
from dflash.target import FrozenHead, Target
from dflash.tree import DraftTree
from dflash.verify import Verifier, agreeing, divergence

CPU = torch.device("cpu")
MASK = 3
LONG = 28
TEXTS = ("def __init__(self, name):\n    self.", "import os\nimport sys\n\n", "for i in range(")


@torch.no_grad()
def greedy(model, prompt, count, eos=()):
    """The oracle: one token at a time, without a cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] not in eos:
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def completion(prompt, written):
    mask = [0] * len(prompt) + [1] * len(written)
    return Completion("0", "", [*prompt, *written], mask)


def new_drafter(model, block_size, window=0):
    shape = drafter_config(
        model.config,
        num_draft_layers=2,
        block_size=block_size,
        mask_token_id=MASK,
        target_layer_ids=(1, 3),
        sliding_window=window,
    )
    return build_drafter(shape, seed=0, device=CPU)


def perturbed(model, block_size, window=0):
    """A drafter whose weights are far from its first ones: its drafts vary with the position."""
    drafter = new_drafter(model, block_size, window)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return drafter


@pytest.fixture(scope="module")
def target(tiny_model):
    return Target(tiny_model, (1, 3))


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    return [tiny_tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def written(tiny_model, prompts):
    """The target's greedy continuation of each prompt."""
    return [greedy(tiny_model, prompt, LONG) for prompt in prompts]


def as_in_training(target, prompt, written):
    """(blocks, drafter -> hidden states) with an anchor at every position, laid out by training."""
    everything = torch.ones(len(prompt) + len(written), dtype=torch.bool)
    rows = [(torch.tensor(prompt + written), everything)]
    tokens_T, mask_T, lengths, document_T, position_T = pack(rows)
    anchor_N = torch.arange(len(prompt), len(tokens_T) - 1)
    blocks = make_blocks(
        tokens_T, mask_T, document_T, anchor_N, block_size=5, mask_token_id=MASK, gamma=4.0
    )
    features_TF, _ = target.hidden(tokens_T, lengths, final=False)
    inputs_PD = target.head.embedding_VD[blocks.inputs_NB.flatten()]
    return blocks, lambda drafter: drafter(inputs_PD, features_TF, document_T, position_T, anchor_N)


@pytest.fixture(scope="module")
def trained(target, prompts, written):
    """A drafter that has learnt the first completion."""
    drafter = new_drafter(target.model, block_size=5)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    blocks, forward = as_in_training(target, prompts[0], written[0])
    head_VD = target.head.head_VD
    for _ in range(60):
        hidden_PD = forward(drafter)
        main_PD, _, sums = block_losses(
            hidden_PD.detach(), head_VD, AskedSlots.of(blocks), Objective(0, 1, 0)
        )
        optimizer.zero_grad()
        hidden_PD.backward(main_PD / sums.weight)
        optimizer.step()
    return drafter


def check_replay(target, drafter, prompt, expected, eos=(), nodes=0):
    """Decode and replay; both must agree with each other and with the target."""
    head = target.head
    decoded = speculate(
        target,
        drafter,
        head,
        prompt,
        max_new_tokens=len(expected),
        eos_token_ids=eos,
        tree_nodes=nodes,
    )
    replayed = replay(target, drafter, head, completion(prompt, expected), tree_nodes=nodes)
    assert decoded.tokens == expected
    assert sum(decoded.steps) == len(expected) - 1
    assert replayed == decoded
    return decoded


@pytest.mark.parametrize("block_size", [2, 4, 7])
@pytest.mark.parametrize("make", [new_drafter, perturbed])
def test_replay_equals_decoding_and_the_text_is_the_targets(
    target, prompts, written, make, block_size
):
    drafter = make(target.model, block_size)
    for prompt, expected in zip(prompts, written, strict=True):
        check_replay(target, drafter, prompt, expected)


def test_a_trained_drafter_is_accepted_and_changes_nothing(target, trained, prompts, written):
    decoded = check_replay(target, trained, prompts[0], written[0])
    assert decoded.acceptance_length > 1.7
    assert len(set(decoded.steps)) > 1


@pytest.mark.parametrize("nodes", [1, 3, 8, 32])
@pytest.mark.parametrize("make", [new_drafter, perturbed])
def test_a_tree_changes_nothing_in_the_text(target, prompts, written, make, nodes):
    drafter = make(target.model, 5)
    for prompt, expected in zip(prompts, written, strict=True):
        check_replay(target, drafter, prompt, expected, nodes=nodes)


def test_more_nodes_yield_more_tokens_a_pass(target, trained, prompts, written):
    taus = [
        check_replay(target, trained, prompts[0], written[0], nodes=nodes).acceptance_length
        for nodes in (1, 4, 32)
    ]
    assert taus[0] < taus[1] < taus[2]


def test_branches_are_really_taken(target, prompts, written, monkeypatch):
    """The right token is the drafter's second choice in every slot: a chain yields nothing."""
    prompt, text = prompts[0], written[0]
    full = torch.tensor(prompt + text)

    def second_best(drafter, head, features_TF, tokens_T, anchor_N):
        logits_NSV = torch.zeros(len(anchor_N), 3, 2048)
        for n, anchor in enumerate(anchor_N.tolist()):
            for slot, right in enumerate(full[anchor + 1 : anchor + 4].tolist()):
                logits_NSV[n, slot, [right, (right + 1) % 2048]] = torch.tensor([8.0, 9.0])
        return logits_NSV

    draft_by(monkeypatch, second_best)
    drafter = new_drafter(target.model, 4)
    assert check_replay(target, drafter, prompt, text).steps == [1] * (LONG - 1)
    decoded = check_replay(target, drafter, prompt, text, nodes=14)
    assert decoded.steps == [4] * 6 + [3]


def test_a_tree_without_its_mask_loses_the_text(target, trained, prompts, written, monkeypatch):
    """The control: siblings that see each other spoil the target's answers."""
    monkeypatch.setattr(
        DraftTree, "visible_MM", lambda tree: torch.ones(len(tree.tokens), len(tree.tokens)).bool()
    )
    texts = [
        speculate(
            target,
            trained,
            target.head,
            prompt,
            max_new_tokens=LONG,
            eos_token_ids=(),
            tree_nodes=16,
        ).tokens
        for prompt in prompts
    ]
    assert texts != written


def test_a_tree_ends_with_the_first_end_token(target, trained, prompts, written):
    for where in (0, 3, 9):
        eos = [written[0][where]]
        expected = written[0][: written[0].index(eos[0]) + 1]
        check_replay(target, trained, prompts[0], expected, eos, nodes=8)


def test_a_tree_through_eager_attention(tiny_target_dir, trained, prompts, written):
    eager = AutoModelForCausalLM.from_pretrained(
        tiny_target_dir, dtype=torch.float32, attn_implementation="eager"
    )
    check_replay(Target(eager, (1, 3)), trained, prompts[0], written[0], nodes=8)


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_a_tree_needs_a_target_that_takes_a_mask(hybrid_model, small_sizes, kind):
    target = Target(hybrid_model if kind == "hybrid" else mistral(small_sizes, window=8), (1, 3))
    with pytest.raises(ModelError, match="needs full attention in every layer") as raised:
        speculate(
            target,
            perturbed(target.model, 4),
            target.head,
            [7, 8],
            max_new_tokens=8,
            eos_token_ids=(),
            tree_nodes=4,
        )
    assert "--tree-nodes" in raised.value.remedy


def mistral(sizes, window):
    """A random model whose config names one window for all layers, and no kinds of layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)).eval()


@pytest.mark.parametrize(("window", "nodes"), [(8, 0), (None, 0), (None, 6)])
def test_a_target_with_one_window_for_all_layers(small_sizes, window, nodes):
    target = Target(mistral(small_sizes, window), (1, 3))
    assert target.has_full_attention == (window is None)
    prompt = [7, 8, 9, 10]
    expected = greedy(target.model, prompt, 24)
    text = speculate(
        target,
        perturbed(target.model, 4),
        target.head,
        prompt,
        max_new_tokens=24,
        eos_token_ids=(),
        tree_nodes=nodes,
    )
    assert text.tokens == expected


def test_plain_decoding_is_the_targets_own(target, prompts, written):
    for prompt, text in zip(prompts, written, strict=True):
        own = decode_plainly(target, prompt, max_new_tokens=LONG, eos_token_ids=())
        assert own == text
        stop = decode_plainly(target, prompt, max_new_tokens=LONG, eos_token_ids=[text[4]])
        assert stop == text[: text.index(text[4]) + 1]


def test_a_float32_drafter_serves_a_bfloat16_target(tiny_target_dir, trained, prompts):
    """In bfloat16, as in training; and the same up to rounding as in float32."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.bfloat16)
    target = Target(model, (1, 3))
    tokens_T = torch.tensor(prompts[0])
    features_TF, _ = target.hidden(tokens_T, [len(tokens_T)], final=False)
    context_TD = read_context(trained, target.head, features_TF)
    anchor_N = torch.tensor([5, 9])
    logits_NSV = draft_logits(trained, target.head, context_TD, tokens_T, anchor_N)
    assert logits_NSV.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in trained.parameters())
    head = FrozenHead(target.head.embedding_VD.float(), target.head.head_VD.float())
    context_TD = read_context(trained, head, features_TF.float())
    exact_NSV = draft_logits(trained, head, context_TD, tokens_T, anchor_N)
    close = (logits_NSV.float() - exact_NSV).abs().max() / exact_NSV.abs().max()
    assert close < 0.03
    own = decode_plainly(target, prompts[0], max_new_tokens=LONG, eos_token_ids=())
    for nodes in (0, 8):
        decoded = speculate(
            target,
            trained,
            target.head,
            prompts[0],
            max_new_tokens=LONG,
            eos_token_ids=(),
            tree_nodes=nodes,
        )
        differs = divergence(target, prompts[0], decoded.tokens, own)
        assert differs is None or differs.gap <= 0.125


def knowing(full, wrong_at):
    """Stands for `draft_logits`: the right tokens, but at the (anchor, slot)s of `wrong_at`."""

    def proposing(drafter, head, features_TF, tokens_T, anchor_N):
        drafts = []
        for anchor in anchor_N.tolist():
            assert len(features_TF) >= anchor  # all that the anchor may see
            right = [*full[anchor + 1 : anchor + drafter.config.block_size], *[MASK] * 10]
            draft = right[: drafter.config.block_size - 1]
            for slot in range(len(draft)):
                if (anchor, slot) in wrong_at:
                    draft[slot] = (draft[slot] + 1) % 64  # another one, of any vocabulary
            drafts.append(draft)
        return torch.nn.functional.one_hot(torch.tensor(drafts), head.vocab_size).float()

    return proposing


def draft_by(monkeypatch, proposing):
    """Replace the drafter, in replays and in decoding."""

    def draft(context, features_MF, anchor):
        context.length += len(features_MF)
        anchor_1 = torch.tensor([context.length])
        return proposing(context.drafter, context.head, range(context.length), None, anchor_1)[0]

    monkeypatch.setattr(decode, "draft_logits", proposing)
    monkeypatch.setattr(DraftContext, "draft", draft)


@pytest.mark.parametrize("share_wrong", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 17, LONG])
def test_steps_with_drafts_of_any_quality(
    target, prompts, written, monkeypatch, share_wrong, count
):
    prompt, expected = prompts[0], written[0][:count]
    random = torch.Generator().manual_seed(count)
    wrong = torch.rand(100, 4, generator=random) < share_wrong
    full = prompt + written[0]
    draft_by(monkeypatch, knowing(full, set(map(tuple, wrong.nonzero().tolist()))))
    decoded = check_replay(target, new_drafter(target.model, 5), prompt, expected)
    if share_wrong == 1.0:
        assert decoded.steps == [1] * (count - 1)
    if share_wrong == 0.0:
        whole, rest = divmod(count - 1, 5)
        assert decoded.steps == [5] * whole + [rest] * (rest > 0)


def test_steps_by_hand(target, prompts, written, monkeypatch):
    prompt, full = prompts[0], prompts[0] + written[0]
    first = len(prompt)
    # Block 4: the first step is right in slots 0 and 1, the second in none, the third in all.
    wrong = {(first, 2), (first + 3, 0)}
    draft_by(monkeypatch, knowing(full, wrong))
    decoded = check_replay(target, new_drafter(target.model, 4), prompt, written[0][:9])
    assert decoded.steps == [3, 1, 4]
    assert decoded.acceptance_length == pytest.approx(8 / 3)


@pytest.mark.parametrize("where", [0, 1, 5, 12])
def test_decoding_ends_with_the_first_end_token(target, prompts, written, monkeypatch, where):
    prompt, text = prompts[1], written[1]
    eos = [text[where], 2047]
    expected = text[: text.index(text[where]) + 1]
    for drafter in (new_drafter(target.model, 5), perturbed(target.model, 5)):
        decoded = speculate(
            target, drafter, target.head, prompt, max_new_tokens=LONG, eos_token_ids=eos
        )
        assert decoded.tokens == expected == greedy(target.model, prompt, LONG, eos)
    # Also in the middle of a draft that goes on after it.
    draft_by(monkeypatch, knowing(prompt + text, set()))
    decoded = speculate(
        target, drafter, target.head, prompt, max_new_tokens=LONG, eos_token_ids=eos
    )
    assert decoded.tokens == expected
    assert decoded == replay(target, drafter, target.head, completion(prompt, expected))


def test_a_completion_of_one_token_has_no_step(target, prompts, written):
    drafter = new_drafter(target.model, 4)
    replayed = replay(target, drafter, target.head, completion(prompts[0], written[0][:1]))
    assert replayed == Decoded(written[0][:1], [])
    assert replayed.acceptance_length == 1.0


def test_replaying_in_parts_changes_nothing(target, trained, prompts, written, monkeypatch):
    done = completion(prompts[0], written[0])
    whole = replay(target, trained, target.head, done)
    monkeypatch.setattr(decode, "BLOCKS_PER_PASS", 7)
    assert replay(target, trained, target.head, done) == whole


def test_a_draft_is_the_argmax_of_what_training_computes(target, trained, prompts, written):
    blocks, forward = as_in_training(target, prompts[0], written[0])
    with torch.no_grad():
        logits_PV = forward(trained) @ target.head.head_VD.T
    expected = logits_PV.argmax(-1).view_as(blocks.labels_NB)[:, 1:]
    tokens_T = torch.tensor(prompts[0] + written[0])
    features_TF, _ = target.hidden(tokens_T, [len(tokens_T)], final=False)
    context_TD = read_context(trained, target.head, features_TF)
    logits_NSV = draft_logits(trained, target.head, context_TD, tokens_T, blocks.anchor_N)
    assert logits_NSV.argmax(-1).equal(expected)


def test_a_draft_sees_nothing_at_or_after_its_anchor(target, trained, prompts, written):
    tokens_T = torch.tensor(prompts[0] + written[0])
    features_TF, _ = target.hidden(tokens_T, [len(tokens_T)], final=False)
    context_TD = read_context(trained, target.head, features_TF)
    anchor_N = torch.tensor([15])
    expected = draft_logits(trained, target.head, context_TD, tokens_T, anchor_N)
    less_SV = DraftContext(trained, target.head).draft(features_TF[:15], int(tokens_T[15]))
    torch.testing.assert_close(less_SV[None], expected)
    context_TD[15:] = torch.randn_like(context_TD[15:])
    again = draft_logits(trained, target.head, context_TD, tokens_T, anchor_N)
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("window", [0, 3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_from_what_was_kept_is_the_one_from_all(target, prompts, written, window, dtype):
    """Whatever was read at once: first the prompt, then one token to five."""
    drafter = perturbed(target.model, 5, window)
    head = FrozenHead(target.head.embedding_VD.to(dtype), target.head.head_VD.to(dtype))
    tokens = prompts[0] + written[0]
    tokens_T = torch.tensor(tokens)
    features_TF = target.hidden(tokens_T, [len(tokens)], final=False)[0].to(dtype)
    context_TD = read_context(drafter, head, features_TF)
    context, anchor = DraftContext(drafter, head), len(prompts[0])
    for more in (1, 2, 5, 1, 3):
        logits_SV = context.draft(features_TF[context.length : anchor], tokens[anchor])
        anchor_1 = torch.tensor([anchor])
        (expected_SV,) = draft_logits(drafter, head, context_TD, tokens_T, anchor_1)
        assert logits_SV.dtype == dtype
        rounding = 1e-4 if dtype == torch.float32 else 0.03
        largest = expected_SV.abs().max().item()
        torch.testing.assert_close(logits_SV, expected_SV, rtol=0, atol=rounding * largest)
        anchor += more


def verifier_of(target, monkeypatch, cached):
    monkeypatch.setattr(Target, "keeps_all_keys", cached)
    return Verifier(target)


def test_a_verifier_with_a_cache_equals_one_without(target, monkeypatch, prompts):
    cached, bare = (verifier_of(target, monkeypatch, cached) for cached in (True, False))
    ids = prompts[0]
    for verifier in (cached, bare):
        verifier.extend(ids)
    for added, kept in (([5, 6, 7, 8], 2), ([9], 1), ([10, 11, 12], 0), ([13, 14], 2)):
        logits = [verifier.extend(added) for verifier in (cached, bare)]
        assert logits[0].shape == (len(added), 2048)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        ids = ids + added[:kept]
        for verifier in (cached, bare):
            verifier.keep(len(ids))
        expected, _ = target.hidden(torch.tensor(ids), [len(ids)], final=False)
        for verifier in (cached, bare):
            torch.testing.assert_close(verifier.features_TF, expected, rtol=1e-4, atol=1e-4)


def test_only_full_attention_can_be_rolled_back(target, hybrid_model):
    assert target.keeps_all_keys
    assert not Target(hybrid_model, (1, 3)).keeps_all_keys


@pytest.mark.parametrize("make", [new_drafter, perturbed])
def test_a_hybrid_target_is_decoded_without_loss(hybrid_model, make, monkeypatch):
    target = Target(hybrid_model, (1, 3))
    prompt = [7, 8, 9, 10]
    expected = greedy(hybrid_model, prompt, 20)
    assert len(set(expected)) > 3
    drafter = make(hybrid_model, 4)
    check_replay(target, drafter, prompt, expected)
    # Rejected drafts after accepted ones must not stay in the state.
    wrong = {(anchor, anchor % 4) for anchor in range(40)}
    draft_by(monkeypatch, knowing(prompt + expected, wrong))
    decoded = check_replay(target, drafter, prompt, expected)
    assert decoded.acceptance_length > 1.5


def test_agreement_is_counted_up_to_the_first_difference():
    assert agreeing([1, 2, 3], [1, 2, 3]) == 3
    assert agreeing([1, 2, 3], [1, 9, 3]) == 1
    assert agreeing([9], [1]) == 0
    assert agreeing([1, 2], [1, 2, 3]) == agreeing([1, 2, 3], [1, 2]) == 2
    assert agreeing([], [1]) == 0


def test_tau_is_a_mean_of_means():
    decoded = [Decoded([0] * 9, [4, 4]), Decoded([0] * 3, [1] * 2), Decoded([0], [])]
    assert acceptance_length(decoded) == pytest.approx((4 + 1 + 1) / 3)


def test_the_targets_own_text_does_not_diverge(target, prompts, written):
    assert divergence(target, prompts[0], written[0], written[0]) is None


@pytest.mark.parametrize("index", [0, 7])
def test_a_divergence_says_where_and_how_near_the_choice_was(target, prompts, written, index):
    text = written[0]
    other = [*text[:index], text[index] + 1, *text[index + 1 :]]
    found = divergence(target, prompts[0], other, text)
    with torch.no_grad():
        logits_V = target.model(torch.tensor([prompts[0] + text[:index]])).logits[0, -1]
    assert found.index == index
    assert found.gap == pytest.approx(float(logits_V.max() - logits_V[text[index] + 1]), abs=1e-4)
    assert found.gap > 0.1


def test_a_text_that_ends_early_diverges_at_its_end(target, prompts, written):
    for pair in ((written[0][:5], written[0]), (written[0], written[0][:5])):
        assert divergence(target, prompts[0], *pair) == verify.Divergence(5, math.inf)


def test_one_replay_of_many_budgets_equals_one_for_each(target, trained, prompts, written):
    done = completion(prompts[0], written[0])
    budgets = [0, 3, 8, 14]
    together = decode.replays(target, trained, target.head, done, budgets)
    for nodes in budgets:
        assert together[nodes] == replay(target, trained, target.head, done, tree_nodes=nodes)
