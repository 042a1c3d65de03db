"""Which rows form which batch: a function of (lengths, seed, epoch) and of nothing else.

A batch is made of shares: rows that ascend in length, and are padded to the longest of their share.
One share to a batch would pad hardly more, but rows of like length are of like kind, too, and a
step on them alone is a step astray.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

SHARES = 4
"""A full batch has at least so many shares."""
SHARES_PER_GROUP = 32 * SHARES
"""Rows are sorted by length inside groups of this many full shares: enough rows for shares of
similar length (little padding), few enough that an epoch's order stays random."""


@dataclass(frozen=True)
class BatchRows:
    """The rows of one micro-batch; `index` counts micro-batches from the start of the run."""

    index: int
    epoch: int
    rows: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """Every micro-batch of the run, epoch after epoch; the last step is filled up when it is read.

    An index at or past `len(plan)` has no rows: it pads the last optimizer step.
    """

    batches: tuple[BatchRows, ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> BatchRows:
        if index < len(self.batches):
            return self.batches[index]
        return BatchRows(index, self.batches[-1].epoch, np.empty(0, dtype=np.int64))


def plan_batches(
    lengths: np.ndarray,
    *,
    epochs: int,
    token_budget: int,
    max_batch_size: int,
    seed: int,
) -> BatchPlan:
    """Deal every epoch's shuffled rows into batches of at most `token_budget` padded tokens.

    Args:
        lengths: tokens of each row that may be used; a row of length 0 is left out, and none is
            longer than `token_budget`.
    """
    batches: list[BatchRows] = []
    for epoch in range(epochs):
        for rows in _epoch_batches(lengths, token_budget, max_batch_size, seed, epoch):
            batches.append(BatchRows(len(batches), epoch, rows))
    return BatchPlan(tuple(batches))


def shares_of(lengths: Sequence[int]) -> list[list[int]]:
    """The lengths of a batch's rows, share by share: one ends where lengths fall."""
    shares: list[list[int]] = []
    for length in lengths:
        if not shares or length < shares[-1][-1]:
            shares.append([])
        shares[-1].append(length)
    return shares


def _epoch_batches(
    lengths: np.ndarray, token_budget: int, max_batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    random = np.random.default_rng([seed, epoch])
    rows = random.permutation(np.flatnonzero(lengths))
    most_rows = math.ceil(max_batch_size / SHARES)
    shares = list(_shares(rows, lengths, token_budget // SHARES, most_rows))
    dealt = [shares[i] for i in random.permutation(len(shares))]
    return list(_filled(dealt, lengths, token_budget, max_batch_size))


def _shares(
    rows: np.ndarray, lengths: np.ndarray, most_tokens: int, most_rows: int
) -> Iterator[np.ndarray]:
    group = SHARES_PER_GROUP * most_rows
    for start in range(0, len(rows), group):
        some = rows[start : start + group]
        by_length = some[np.argsort(lengths[some], kind="stable")]
        yield from _cut(by_length, lengths, most_tokens, most_rows)


def _cut(
    rows: np.ndarray, lengths: np.ndarray, most_tokens: int, most_rows: int
) -> Iterator[np.ndarray]:
    """Cut rows that are sorted by length into shares; a share of one row may have more tokens."""
    start = 0
    for stop, row in enumerate(rows):
        count = stop - start + 1
        if count > 1 and (count > most_rows or count * lengths[row] > most_tokens):
            yield rows[start:stop]
            start = stop
    yield rows[start:]


def _filled(
    shares: list[np.ndarray], lengths: np.ndarray, most_tokens: int, most_rows: int
) -> Iterator[np.ndarray]:
    """Put shares together, in their order, for as long as they fit."""
    batch: list[np.ndarray] = []
    rows = tokens = 0
    for share in shares:
        padded = len(share) * lengths[share[-1]]
        if batch and (tokens + padded > most_tokens or rows + len(share) > most_rows):
            yield _together(batch, lengths)
            batch, rows, tokens = [], 0, 0
        batch.append(share)
        rows, tokens = rows + len(share), tokens + padded
    yield _together(batch, lengths)


def _together(shares: list[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    """The rows of a batch, longer shares first: see `shares_of`."""
    return np.concatenate(sorted(shares, key=lambda share: -lengths[share[-1]]))
