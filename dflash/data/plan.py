"""Which rows form which batch: a function of (lengths, seed, epoch) and of nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Rows are sorted by length inside groups of this many full batches: enough rows to make batches
# of similar length (little padding), few enough that an epoch's order stays random.
BATCHES_PER_GROUP = 32


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
    """Cut every epoch's shuffled rows into batches of at most `token_budget` padded tokens.

    Args:
        lengths: tokens of each row that may be used; a row of length 0 is left out.
        token_budget: upper bound of rows x longest row.
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
    group = max(1, BATCHES_PER_GROUP * max_batch_size)
    batches: list[np.ndarray] = []
    for start in range(0, len(order), group):
        rows = order[start : start + group]
        by_length = rows[np.argsort(lengths[rows], kind="stable")]
        batches.extend(_cut(by_length, lengths, token_budget, max_batch_size))
    return [batches[i] for i in random.permutation(len(batches))]


def _cut(
    rows: np.ndarray, lengths: np.ndarray, token_budget: int, max_batch_size: int
) -> Iterator[np.ndarray]:
    """Cut rows that are sorted by length, so that the last row of a cut is its longest."""
    start = 0
    for stop, row in enumerate(rows):
        count = stop - start + 1
        if count > max_batch_size or count * lengths[row] > token_budget:
            yield rows[start:stop]
            start = stop
    if start < len(rows):
        yield rows[start:]
