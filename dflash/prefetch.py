"""BatchPrefetcher: threads that read rows and lay out micro-batches and their draft blocks."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash.batches import Batch
from dflash.concurrency import Gate
from dflash.config import TrainConfig
from dflash.data.completions import Completions
from dflash.data.plan import BatchPlan, plan_batches
from dflash.errors import DataError
from dflash.heartbeat import started, waiting, working
from dflash.randomness import ANCHORS, generator
from dflash.routing import RoutedSender

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchSource:
    """Makes micro-batch `index` of the run, whichever thread asks and in whatever order."""

    data: Completions
    plan: BatchPlan
    mask_token_id: int
    config: TrainConfig
    anchors: np.ndarray
    """Per row, how many places there are for an anchor."""

    def batch(self, index: int) -> Batch:
        """The micro-batch: a function of (data, config, index)."""
        objective, model = self.config.objective, self.config.model
        planned = self.plan[index]
        return Batch.drawn(
            index,
            planned.epoch,
            [self._row(row) for row in planned.rows],
            block_size=model.block_size,
            mask_token_id=self.mask_token_id,
            gamma=objective.gamma,
            per_document=objective.max_anchors,
            in_all=self.most_blocks,
            generator=generator(self.config.data.seed, ANCHORS, planned.epoch, index),
            rows=planned.rows.tolist(),
        )

    @property
    def most_blocks(self) -> int:
        """Blocks that a micro-batch has at most."""
        return self.config.objective.max_draft_positions // self.config.model.block_size

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and draft blocks of every micro-batch of the run."""
        lengths, drawn = self.lengths, np.minimum(self.anchors, self.config.objective.max_anchors)
        tokens = np.array([lengths[batch.rows].sum() for batch in self.plan.batches])
        blocks = np.array([drawn[batch.rows].sum() for batch in self.plan.batches])
        return tokens, np.minimum(blocks, self.most_blocks)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row as it is trained on: cut at --max-seq-len."""
        return np.minimum(self.data.lengths, self.config.data.max_seq_len)

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, loss_mask = self.data.tokens(int(row))
        limit = self.config.data.max_seq_len
        return torch.from_numpy(tokens[:limit]), torch.from_numpy(loss_mask[:limit])


def open_source(config: TrainConfig, *, mask_token_id: int, vocab_size: int) -> BatchSource:
    """Open --data-dir, check it against the target's vocabulary and plan every batch of the run.

    Rows too short or without two supervised tokens in a row cannot hold an anchor: they are left
    out, rows past --max-seq-len are cut, and both are counted in the log. Raises DataError when
    nothing is left.
    """
    data = Completions(config.data.data_dir)
    data.check_target(Path(config.model.target_model), vocab_size)
    lengths = np.minimum(data.lengths, config.data.max_seq_len)
    anchors = data.anchor_counts(config.data.max_seq_len)
    usable = anchors > 0
    if not usable.any():
        raise DataError(
            f"--data-dir {data.directory}: none of {len(data)} rows has two supervised tokens in a "
            "row, so there is nothing to draft",
            remedy="check loss_mask: it must be 1 on the tokens that the target wrote",
        )
    plan = plan_batches(
        np.where(usable, lengths, 0),
        epochs=config.optimizer.epochs,
        token_budget=config.data.token_budget,
        max_batch_size=config.data.max_batch_size,
        seed=config.data.seed,
    )
    log.info(
        "data: %d rows, %d tokens; %d rows left out (no anchor), %d cut at %d tokens; %d batches",
        len(data),
        lengths[usable].sum(),
        (~usable).sum(),
        (data.lengths > config.data.max_seq_len).sum(),
        config.data.max_seq_len,
        len(plan),
    )
    if short := int((lengths[usable] < config.model.block_size).sum()):
        log.info("data: %d rows are shorter than a block; theirs end with the row", short)
    return BatchSource(data, plan, mask_token_id, config, anchors)


def run_prefetch(
    source: BatchSource,
    lay_out: Callable[[Batch], Batch],
    output: RoutedSender[Batch],
    indices: Iterator[int],
    gate: Gate,
) -> None:
    """One of the prefetch threads: makes its share of the batches, laid out for the drafters."""
    with output:
        waiting("the start-up gate")
        gate.wait()
        started()
        for index in indices:
            working(f"batch {index}")
            output.send(index, lay_out(source.batch(index)))
