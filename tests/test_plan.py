"""Which rows form which batch."""

import numpy as np
import pytest

from dflash.data.plan import plan_batches


def lengths_of(rows, seed=0, longest=60):
    return np.random.default_rng(seed).integers(2, longest + 1, rows)


def plan(lengths, epochs=1, token_budget=256, max_batch_size=8, seed=0):
    return plan_batches(
        np.asarray(lengths),
        epochs=epochs,
        token_budget=token_budget,
        max_batch_size=max_batch_size,
        seed=seed,
    )


def rows_of(batches, epoch):
    return [row for batch in batches.batches if batch.epoch == epoch for row in batch.rows.tolist()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("budget", "most_rows"), [(60, 8), (256, 8), (10**6, 3), (256, 1)])
def test_no_batch_exceeds_its_padded_tokens_or_its_rows(seed, budget, most_rows):
    lengths = lengths_of(700, seed)
    for batch in plan(lengths, 2, budget, most_rows, seed).batches:
        assert 1 <= len(batch.rows) <= most_rows
        assert len(batch.rows) * lengths[batch.rows].max() <= budget


def test_batches_are_as_full_as_the_next_row_allows():
    # 10 rows of 8 tokens and a budget of 40: five rows each.
    assert [len(batch.rows) for batch in plan([8] * 10, token_budget=40).batches] == [5, 5]
    assert [len(batch.rows) for batch in plan([8] * 10, max_batch_size=4).batches].count(4) == 2


def test_every_usable_row_comes_once_in_every_epoch():
    lengths = lengths_of(1000)
    lengths[::7] = 0  # left out
    batches = plan(lengths, epochs=3)
    for epoch in range(3):
        assert sorted(rows_of(batches, epoch)) == np.flatnonzero(lengths).tolist()


def test_indices_and_epochs_ascend():
    batches = plan(lengths_of(300), epochs=3)
    assert [batch.index for batch in batches.batches] == list(range(len(batches)))
    epochs = [batch.epoch for batch in batches.batches]
    assert epochs == sorted(epochs) and set(epochs) == {0, 1, 2}


def test_the_order_is_a_function_of_seed_and_epoch():
    lengths = lengths_of(300)
    once, again, other = plan(lengths, 2, seed=1), plan(lengths, 2, seed=1), plan(lengths, seed=2)
    assert rows_of(once, 0) == rows_of(again, 0)
    assert rows_of(once, 1) == rows_of(again, 1)
    assert rows_of(once, 0) != rows_of(once, 1)
    assert rows_of(once, 0) != rows_of(other, 0)
    # An epoch is the same however many follow.
    assert rows_of(plan(lengths, 1, seed=1), 0) == rows_of(once, 0)


def test_rows_of_a_batch_have_similar_lengths_but_batches_come_in_any_order():
    lengths = lengths_of(512)
    batches = plan(lengths, token_budget=10**6).batches
    spread = np.mean([np.ptp(lengths[batch.rows]) for batch in batches])
    random_rows = np.random.default_rng(0).permutation(512).reshape(-1, 8)
    assert spread < 0.2 * np.ptp(lengths[random_rows], axis=1).mean()
    longest = [lengths[batch.rows].max() for batch in batches]
    assert longest != sorted(longest)


def test_past_the_end_there_are_fillers():
    batches = plan(lengths_of(20), epochs=2)
    filler = batches[len(batches) + 3]
    assert (filler.index, filler.epoch, filler.rows.tolist()) == (len(batches) + 3, 1, [])
    assert batches[len(batches) - 1].rows.size
