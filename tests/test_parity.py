"""Train/serve parity: a gap where a mask leaks or a position is off by one, and none elsewhere."""

import pytest
import torch

from dflash import attention, parity
from dflash.anchors import make_blocks
from dflash.asked import AskedSlots
from dflash.batches import pack
from dflash.decode import Step, decode_plainly, decode_steps
from dflash.draft_context import DraftContext
from dflash.drafter import build_drafter
from dflash.drafter_config import drafter_config
from dflash.losses import Objective, block_losses
from dflash.parity import DecodedText, SlotParity, slot_parity
from dflash.target import Target
from dflash.tree import DraftTree

TEXTS = ("def __init__(self, name):\n    self.", "import os\nimport sys\n\n", "for i in range(")
LONG = 24


@pytest.fixture(scope="module")
def target(tiny_model):
    return Target(tiny_model, (1, 3))


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    return [tiny_tokenizer(text)["input_ids"] for text in TEXTS]


def train(target, prompts):
    """A drafter that has learnt the target's continuations, with an anchor at every token."""
    shape = drafter_config(
        target.model.config,
        num_draft_layers=2,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(1, 3),
        sliding_window=0,
    )
    drafter = build_drafter(shape, seed=0, device=torch.device("cpu"))
    rows, anchors = [], []
    for prompt in prompts:
        text = decode_plainly(target, prompt, max_new_tokens=LONG, eos_token_ids=())
        start = sum(len(tokens) for tokens, _ in rows)
        anchors += range(start + len(prompt), start + len(prompt) + LONG - 1)
        tokens_T = torch.tensor([*prompt, *text])
        rows.append((tokens_T, torch.arange(len(tokens_T)) >= len(prompt)))
    tokens_T, mask_T, lengths, document_T, position_T = pack(rows)
    blocks = make_blocks(
        tokens_T,
        mask_T,
        document_T,
        torch.tensor(anchors),
        block_size=4,
        mask_token_id=3,
        gamma=4.0,
    )
    features_TF, _ = target.hidden(tokens_T, lengths, final=False)
    inputs_PD = target.head.embedding_VD[blocks.inputs_NB.flatten()]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(60):
        hidden_PD = drafter(inputs_PD, features_TF, document_T, position_T, blocks.anchor_N)
        main_PD, _, sums = block_losses(
            hidden_PD.detach(),
            target.head.head_VD,
            AskedSlots.of(blocks),
            Objective(0, 1, 0),
        )
        optimizer.zero_grad()
        hidden_PD.backward(main_PD / sums.weight)
        optimizer.step()
    return drafter


def table(target, drafter, prompts):
    texts = [
        DecodedText(
            prompt,
            list(
                decode_steps(
                    target, drafter, target.head, prompt, max_new_tokens=LONG, eos_token_ids=()
                )
            ),
        )
        for prompt in prompts
    ]
    return slot_parity(target, drafter, target.head, texts)


@pytest.fixture(scope="module")
def sound(target, prompts):
    return train(target, prompts)


def test_training_and_serving_agree_slot_by_slot(target, sound, prompts):
    slots = table(target, sound, prompts)
    assert [one.slot for one in slots] == [1, 2, 3]
    assert all(one.training == one.decoding for one in slots)
    assert slots[0].decoding > 0.6
    assert slots[0].accepted == slots[0].decoding >= slots[1].accepted >= slots[2].accepted
    assert not any(one.is_wrong for one in slots)


def whole_document(document_T, anchor_N, block_size, window):
    """Stands for the context mask: a slot sees all of its document, its own label included."""
    return (document_T[anchor_N][:, None] == document_T).repeat_interleave(block_size, dim=0)


def every_block(anchor_N, block_size, window):
    """Stands for the own-block mask: the block at a slot's label has it as its anchor."""
    return torch.ones(2 * [len(anchor_N) * block_size], dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "leaky"), [("_context_mask", whole_document), ("_own_block_mask", every_block)]
)
def test_a_mask_that_leaks_is_a_gap(target, prompts, monkeypatch, mask, leaky):
    """The bug is there in training and in the table's training column; serving has no future."""
    monkeypatch.setattr(attention, mask, leaky)
    slots = table(target, train(target, prompts), prompts)
    assert all(one.is_wrong and one.gap > 0 for one in slots)
    assert max(one.gap for one in slots) > 0.15


def test_a_position_that_is_off_by_one_is_a_gap(target, sound, prompts, monkeypatch):
    """Serving that hands on the features one token late."""
    right, read = DraftContext.draft, {}

    def late(context, features_MF, anchor):
        context.length += len(features_MF)
        read[context] = torch.cat([read.get(context, features_MF[:0]), features_MF])
        anew = DraftContext(context.drafter, context.head)
        return right(anew, read[context].roll(1, dims=0), anchor)

    monkeypatch.setattr(DraftContext, "draft", late)
    slots = table(target, sound, prompts)
    assert slots[0].gap > 0.3
    assert all(one.is_wrong for one in slots)


def test_the_table_by_hand():
    """Two passes over `1 2 | 3 4 5 6 7`; the second draft reaches past the end."""
    steps = [
        Step([3], 1, None),
        Step([4, 5], 2, DraftTree.chain(3, [4, 9, 6])),
        Step([6, 7], 4, DraftTree.chain(5, [6, 8, 8])),
    ]
    text = DecodedText([1, 2], steps)
    assert text.tokens == [1, 2, 3, 4, 5, 6, 7]
    assert text.drafts == [(2, [4, 9, 6]), (4, [6, 8, 8])]
    right_B, accepted_B = parity._served([text])
    assert right_B.tolist() == [0, 2, 0, 1]
    assert accepted_B.tolist() == [0, 2, 0, 0]


def test_a_text_without_a_draft_has_no_table(target, sound):
    text = DecodedText([1, 2], [Step([3], 1, None)])
    assert slot_parity(target, sound, target.head, [text]) == []


@pytest.mark.parametrize(("training", "wrong"), [(0.5, False), (0.54, False), (0.56, True)])
def test_more_than_rounding_is_a_gap(training, wrong):
    assert SlotParity(1, 100, training, 0.5, 0.5).is_wrong is wrong
    assert SlotParity(1, 100, 0.5, training, 0.5).is_wrong is wrong
