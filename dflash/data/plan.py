"""Which rows form which batch: a function of (lengths, seed, epoch) and of nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Rows are sorted by length inside groups of this many full batches: enough rows to make shares of
# similar length (little padding), few enough that an epoch's order stays random.
BATCHES_PER_GROUP = 32
SHARES = 4
"""Of rows of similar length, and so often of similar kind, a batch has so many: a fairer sample."""


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

    A batch is made of `SHARES` or more, each of rows that ascend in length, padded to its longest.

    Args:
        lengths: tokens of each row that may be used; a row of length 0 is left out.
    """
    batches: list[BatchRows] = []
    for epoch in range(epochs):
        for rows in _epoch_batches(lengths, token_budget, max_batch_size, seed, epoch):
            batches.append(BatchRows(len(batches), epoch, rows))
    return BatchPlan(tuple(batches))


def _epoch_batches(
    lengths: np.ndarray, token_budget: int, max_batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(np.flatnonzero(lengths))
    group = BATCHES_PER_GROUP * max_batch_size
    shares: list[np.ndarray] = []
    for start in range(0, len(order), group):
        rows = order[start : start + group]
        by_length = rows[np.argsort(lengths[rows], kind="stable")]
        shares.extend(
            _cut(by_length, lengths, token_budget // SHARES, -(-max_batch_size // SHARES))
        )
    dealt = [shares[i] for i in random.permutation(len(shares))]
    return list(_filled(dealt, lengths, token_budget, max_batch_size))


def _cut(
    rows: np.ndarray, lengths: np.ndarray, most_tokens: int, most_rows: int
) -> Iterator[np.ndarray]:
    """Cut rows that are sorted by length; one row alone may have more tokens."""
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
    """Put shares together for as long as they fit."""
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
    """Longer ones first, so that a share ends where lengths fall."""
    return np.concatenate(sorted(shares, key=lambda share: -lengths[share[-1]]))
