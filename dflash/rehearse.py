"""`dflash train --rehearse`: the run in small, before the night; what it needs, how long it takes.

Everything is loaded as the run will load it. Two steps are trained: the first on the largest
micro-batches, so that memory peaks as it will, the second on typical ones. Their state is saved,
loaded again, saved again and compared, and one prompt is decoded by replay. It all happens in a
scratch directory on the file system of --output-dir, where nothing of it stays.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from dflash import failures, needs
from dflash.checkpoint import load_state
from dflash.compare import read_metrics
from dflash.config import TrainConfig
from dflash.data.plan import BatchPlan
from dflash.decode import replay
from dflash.drafter import Drafter, build_drafter
from dflash.errors import CheckpointError, ConfigError, Exit
from dflash.optim import make_optimizer
from dflash.resolve import check_loggers
from dflash.rundir import RunDirectory, run_directory
from dflash.target import Target
from dflash.trainer import Run, open_run

log = logging.getLogger(__name__)

STEPS = 2


def rehearse(config: TrainConfig) -> int:
    """Rehearse the run; returns the exit code, 0 if it can start. What goes wrong is logged."""
    output_dir = Path(config.run.output_dir)
    with (
        _scratch(output_dir) as scratch,
        run_directory(_elsewhere(config, scratch)) as directory,
    ):
        real = replace(directory, path=output_dir, config=config)
        return failures.reported(lambda: _rehearse(real, directory))


@contextmanager
def _scratch(output_dir: Path) -> Iterator[Path]:
    """A directory on the file system of --output-dir, gone afterwards."""
    nearest = next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists())
    try:
        scratch = TemporaryDirectory(prefix=".rehearsal-", dir=nearest)
    except OSError as error:
        raise ConfigError(
            "--output-dir", f"must be a writable directory ({error.strerror})", output_dir
        ) from error
    with scratch as name:
        yield Path(name)


def _elsewhere(config: TrainConfig, scratch: Path) -> TrainConfig:
    """The same run from its beginning, in the scratch directory, without remote loggers."""
    run = replace(config.run, output_dir=str(scratch), resume="never")
    silent = replace(config.logging, wandb_project=None, wandb_run_name=None, tensorboard=False)
    return replace(config, run=run, logging=replace(silent, log_interval=1))


def _rehearse(real: RunDirectory, directory: RunDirectory) -> int:
    check_loggers(real.config)
    real.resume_from()  # the run would refuse now what it refuses then
    started_s = time.monotonic()
    whole = open_run(directory.config, directory)
    short = replace(
        whole,
        source=replace(whole.source, plan=_extremes(whole)),
        plan=replace(whole.plan, total_steps=min(STEPS, whole.plan.total_steps)),
    )
    models = short.load()
    loaded_s = time.monotonic() - started_s
    if code := short.start(models):
        return code
    drafter, saving = _saved_and_reloaded(short)
    needs.report_memory(whole, models.targets, sum(p.nbytes for p in drafter.parameters()))
    _replay(short, models.targets[0], drafter)
    _report_time(whole, directory.path, loaded_s, saving)
    log.info("rehearsal passed: nothing was left in %s", real.path)
    return Exit.OK


def _extremes(run: Run) -> BatchPlan:
    """First the largest micro-batches of the run, then some that are spread evenly by size."""
    tokens, _ = run.source.sizes()
    order = np.argsort(tokens, kind="stable")[::-1]
    largest, others = order[: run.plan.per_step], order[run.plan.per_step :]
    count = min(run.plan.per_step, len(others))
    typical = others[np.linspace(0, len(others) - 1, count).astype(int)] if count else others
    chosen = (*largest, *typical)
    return BatchPlan(tuple(run.source.plan.batches[i] for i in chosen))


@dataclass(frozen=True)
class Saving:
    """What a checkpoint costs."""

    save_s: float
    load_s: float
    nbytes: int


def _saved_and_reloaded(run: Run) -> tuple[Drafter, Saving]:
    """The drafter out of the checkpoint; CheckpointError unless it saves to the same bytes."""
    saved = run.checkpoints.require_latest()
    started_s = time.monotonic()
    state = load_state(saved)
    drafter = build_drafter(run.shape, seed=run.config.data.seed + 1, device=torch.device("cpu"))
    optimizer = make_optimizer(drafter, run.config.optimizer)
    state.restore(drafter, optimizer)
    loaded_s = time.monotonic()
    again = replace(run.checkpoints, directory=saved.parent / "again")
    resaved = again.save(drafter, optimizer, state.progress)
    saving = Saving(time.monotonic() - loaded_s, loaded_s - started_s, _nbytes(saved))
    for name in ("model.safetensors", "training.safetensors"):
        if (saved / name).read_bytes() != (resaved / name).read_bytes():
            raise CheckpointError(f"{name} is another one after loading and saving it")
    log.info(
        "checkpoint: %.1f MiB, saved in %.1f s, loaded in %.1f s, the same when saved again",
        saving.nbytes / 2**20,
        saving.save_s,
        saving.load_s,
    )
    return drafter, saving


def _replay(run: Run, target: Target, drafter: Drafter) -> None:
    """Decode one row by replay, as the measurement of a finished drafter does."""
    row = int(run.source.plan[0].rows[0])
    done = run.source.data.completion(row).cut(run.config.data.max_seq_len)
    drafter.to(target.device, run.dtype)
    decoded = replay(target, drafter, target.head, done)
    log.info("replay of row %d: acceptance length %.2f", row, decoded.acceptance_length)


def _report_time(whole: Run, scratch: Path, loaded_s: float, saving: Saving) -> None:
    """The run's duration and disk, from what was measured here."""
    rows = read_metrics(scratch)
    first, last = rows[min(rows)], rows[max(rows)]
    trained_s = last["elapsed_s"] - first["elapsed_s"] + first["seconds"]
    tokens_per_s = sum(row["tokens"] for row in rows.values()) / trained_s
    tokens = int(whole.source.sizes()[0].sum())
    saves = -(-whole.plan.total_steps // whole.config.run.save_interval)
    total_s = loaded_s + tokens / tokens_per_s + saves * saving.save_s
    log.info(
        "time: loaded in %.1f s, then %.0f tok/s; the whole run, %d steps on %d tokens with %d"
        " checkpoints: about %s",
        loaded_s,
        tokens_per_s,
        whole.plan.total_steps,
        tokens,
        saves,
        timedelta(seconds=round(total_s)),
    )
    kept = min(saves, whole.config.run.keep_checkpoints or saves)
    needs.report_disk(scratch, kept, saving.nbytes)


def _nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
