"""Acceptance length during training: held-out completions, replayed at a step's end."""

import logging
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dflash.config import TrainConfig
from dflash.data.completions import Completion, Completions
from dflash.decode import acceptance_length, replay
from dflash.drafter import Drafter
from dflash.errors import DataError
from dflash.target import FrozenHead, Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Held-out completions and a target of its own to replay them with."""

    target: Target
    documents: list[Completion]

    def measure(self, drafter: Drafter, head: FrozenHead) -> dict[str, float]:
        """tau, the documents replayed and what it cost in seconds.

        Changes nothing: no random number is drawn. The layers run eager, since every document has
        another shape to compile for.
        """
        started_s = time.monotonic()
        decoded = [replay(self.target, drafter, head, one) for one in self.documents]
        return {
            "tau": acceptance_length(decoded),
            "documents": len(decoded),
            "seconds": time.monotonic() - started_s,
        }


def held_out_documents(config: TrainConfig, vocab_size: int) -> list[Completion]:
    """Rows of --eval-data; raises DataError when none of them has anything to draft."""
    evaluation = config.evaluation
    data = Completions(str(evaluation.eval_data))
    data.check_target(Path(config.model.target_model), vocab_size)
    if note := data.sampled():
        log.warning("--eval-data %s", note)
    cut = (data.completion(row).cut(config.data.max_seq_len) for row in range(len(data)))
    answers = (one.first_answer() for one in cut)
    usable = (one for one in answers if one.prompt_length < len(one.input_ids) - 1)
    documents = list(islice(usable, evaluation.eval_rows))
    if not documents:
        raise DataError(
            f"--eval-data {data.directory}: none of {len(data)} rows has two supervised tokens",
            remedy="check loss_mask: it must be 1 on the tokens that the target wrote",
        )
    log.info("evaluation: %d held-out rows every %d steps", len(documents), evaluation.eval_every)
    return documents
