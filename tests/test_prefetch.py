"""Micro-batches: the same whoever makes them, and rows that cannot be used are left out."""

import dataclasses
import logging

import numpy as np
import pytest
import torch

from dflash.data.completions import Completion, write_completions
from dflash.errors import DataError
from dflash.prefetch import open_source

MASK_TOKEN = 1


def completions(count=30, seed=0, longest=80):
    """Random rows; each third row holds no anchor."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(random.integers(4, longest))
        prompt = length - 1 if i % 3 == 0 else int(random.integers(0, length - 2))
        mask = [0] * prompt + [1] * (length - prompt)
        rows.append(Completion(str(i), "", random.integers(2, 2048, length).tolist(), mask))
    return rows


@pytest.fixture
def make_source(train_config):
    def make(rows, **sections):
        config = train_config(**sections)
        write_completions(config.data.data_dir, rows, {})
        return open_source(config, mask_token_id=MASK_TOKEN, vocab_size=2048)

    return make


def flat(batch):
    """Everything in a batch, to compare."""
    tensors = [batch.tokens_T, batch.document_T, batch.position_T]
    tensors += [getattr(batch.blocks, f.name) for f in dataclasses.fields(batch.blocks)]
    return batch.index, batch.epoch, batch.lengths, [t.tolist() for t in tensors]


def test_a_batch_does_not_depend_on_who_asks_first(make_source):
    source = make_source(completions(), objective={"max-anchors": 3})
    forward = [flat(source.batch(i)) for i in range(len(source.plan))]
    torch.rand(5)
    backward = [flat(source.batch(i)) for i in reversed(range(len(source.plan)))]
    assert forward == backward[::-1]


def test_data_of_another_tokenizer_is_refused(train_config):
    config = train_config()
    write_completions(config.data.data_dir, completions(), {"tokenizer_sha256": "0" * 64})
    with pytest.raises(DataError, match="its token ids are another tokenizer's") as caught:
        open_source(config, mask_token_id=MASK_TOKEN, vocab_size=2048)
    assert "Prepare the data with this --target-model" in caught.value.remedy


def test_rows_shorter_than_a_block_are_counted(make_source, caplog):
    rows = [Completion(str(n), "", [5] * n, [1] * n) for n in (2, 3, 9)]
    with caplog.at_level(logging.INFO, "dflash"):
        make_source(rows)
    assert "2 rows are shorter than a block" in caplog.text


def test_anchors_are_drawn_anew_in_each_epoch(make_source):
    source = make_source(completions(3), objective={"max-anchors": 4})
    first, second = (source.batch(i) for i in range(2))
    assert (first.epoch, second.epoch) == (0, 1)
    assert sorted(first.lengths) == sorted(second.lengths)
    assert not first.blocks.anchor_N.equal(second.blocks.anchor_N)


def test_anchors_are_drawn_anew_in_each_batch(make_source):
    rows = [Completion(str(i), "", [5] * 60, [1] * 60) for i in range(20)]
    source = make_source(rows, objective={"max-anchors": 4})
    first, second = (source.batch(i) for i in range(2))
    assert first.epoch == second.epoch and first.lengths == second.lengths
    assert not first.blocks.anchor_N.equal(second.blocks.anchor_N)


def test_batches_hold_the_rows_cut_at_the_limit(make_source):
    rows = completions()
    source = make_source(rows, data={"max-seq-len": 24})
    for index in range(len(source.plan)):
        batch = source.batch(index)
        planned = [rows[int(i)].input_ids[:24] for i in source.plan[index].rows]
        assert [part.tolist() for part in batch.tokens_T.split(batch.lengths)] == planned
        assert batch.lengths == tuple(map(len, planned))


def test_anchors_keep_to_both_caps(make_source):
    caps = {"max-anchors": 5, "max-draft-positions": 4 * 12}
    source = make_source(completions(), objective=caps)
    most = 0
    for index in range(len(source.plan)):
        batch = source.batch(index)
        assert len(batch.blocks.anchor_N) <= 12
        assert batch.document_T[batch.blocks.anchor_N].bincount().max() <= 5
        assert batch.blocks.weights_NB[:, 1].min() == 1.0
        most = max(most, len(batch.blocks.anchor_N))
    assert most == 12


def test_rows_without_an_anchor_are_left_out_and_counted(make_source, caplog):
    rows = completions()
    with caplog.at_level(logging.INFO, "dflash"):
        source = make_source(rows)
    planned = {int(row) for batch in source.plan.batches for row in batch.rows}
    cut = [
        sum(a and b for a, b in zip(row.loss_mask[:64], row.loss_mask[1:64], strict=False))
        for row in rows
    ]
    assert planned == {i for i, anchors in enumerate(cut) if anchors}
    left_out, long = len(rows) - len(planned), sum(len(row.input_ids) > 64 for row in rows)
    assert left_out >= 10 and long > 0
    assert f"{left_out} rows left out (no anchor), {long} cut at 64 tokens" in caplog.text


def test_a_filler_is_an_empty_batch(make_source):
    source = make_source(completions())
    filler = source.batch(len(source.plan) + 1)
    assert filler.is_empty
    assert filler.index == len(source.plan) + 1
    assert filler.blocks.labels_NB.shape == (0, 4)


def test_the_mask_token_fills_what_is_asked(make_source):
    inputs_NB = make_source(completions()).batch(0).blocks.inputs_NB
    assert (inputs_NB[:, 1:] == MASK_TOKEN).all()
    assert (inputs_NB[:, 0] != MASK_TOKEN).all()


@pytest.mark.parametrize("rows", [[], [Completion("0", "", [5, 6, 7], [0, 1, 0])]])
def test_data_without_any_anchor_is_refused(make_source, rows):
    with pytest.raises(DataError, match=f"none of {len(rows)} rows has two supervised tokens"):
        make_source(rows)


def test_a_token_outside_the_vocabulary_is_refused(make_source):
    with pytest.raises(DataError, match="row 0 has token id 2048"):
        make_source([Completion("0", "", [5, 2048, 7], [0, 1, 1])])
