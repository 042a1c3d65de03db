"""Which rows form which batch."""

import numpy as np
import pytest

from dflash.data.plan import SHARES, plan_batches, shares_of


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


def padded_shares(batch, lengths):
    """Tokens of each share of a batch, padding included."""
    return [len(share) * max(share) for share in shares_of(lengths[batch.rows].tolist())]


def rows_of(batches, epoch):
    return [row for batch in batches.batches if batch.epoch == epoch for row in batch.rows.tolist()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("budget", "most_rows"), [(60, 8), (256, 8), (10**6, 3), (256, 1)])
def test_no_batch_exceeds_its_padded_tokens_or_its_rows(seed, budget, most_rows):
    lengths = lengths_of(700, seed)
    for batch in plan(lengths, 2, budget, most_rows, seed).batches:
        assert 1 <= len(batch.rows) <= most_rows
        assert sum(padded_shares(batch, lengths)) <= budget


def test_batches_are_as_full_as_the_next_share_allows():
    # 10 rows of 8 tokens and a budget of 40: shares of one row, five to a batch.
    assert [len(batch.rows) for batch in plan([8] * 10, token_budget=40).batches] == [5, 5]
    assert [len(batch.rows) for batch in plan([8] * 10, max_batch_size=4).batches].count(4) == 2


def test_a_row_of_the_whole_budget_is_a_batch():
    assert sorted(len(batch.rows) for batch in plan([40, 3, 3], token_budget=40).batches) == [1, 2]


def test_batches_are_nearly_full_and_hardly_padded():
    lengths = lengths_of(4000)
    batches = plan(lengths, token_budget=1024, max_batch_size=64).batches
    assert lengths.sum() > 0.85 * 1024 * len(batches)
    padded = sum(sum(padded_shares(batch, lengths)) for batch in batches)
    assert padded < 1.05 * lengths.sum()


def test_a_full_batch_is_a_fair_sample_of_all_lengths():
    lengths = lengths_of(4000, longest=2000)
    *full, _last = plan(lengths, token_budget=32768, max_batch_size=64).batches
    assert min(len(shares_of(lengths[batch.rows].tolist())) for batch in full) >= SHARES
    means = np.array([lengths[batch.rows].mean() for batch in full])
    assert means.std() < 0.7 * lengths.std()
    # The control: rows in the order of their lengths, as many to a batch.
    sorted_means = [part.mean() for part in np.array_split(np.sort(lengths), len(full))]
    assert np.std(sorted_means) > 0.95 * lengths.std()


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


def test_a_share_ends_where_lengths_fall():
    assert shares_of([7, 9, 9, 3, 3, 8, 2]) == [[7, 9, 9], [3, 3, 8], [2]]
    assert shares_of([]) == []


def test_past_the_end_there_are_fillers():
    batches = plan(lengths_of(20), epochs=2)
    filler = batches[len(batches) + 3]
    assert (filler.index, filler.epoch, filler.rows.tolist()) == (len(batches) + 3, 1, [])
    assert batches[len(batches) - 1].rows.size
