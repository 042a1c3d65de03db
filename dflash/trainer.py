"""`dflash train`: the wiring of prefetcher, target loops and drafter loops, and nothing else."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash import failures, heartbeat
from dflash.all_reduce import summing
from dflash.batches import Batch, TargetFeatures
from dflash.checkpoint import Checkpoints, TrainingState
from dflash.compile import install_thread_isolation
from dflash.concurrency import Gate, TaskGroup
from dflash.config import TrainConfig, config_hash
from dflash.data.completions import Completion
from dflash.drafter import Drafter
from dflash.drafter_config import DrafterConfig
from dflash.drafter_loop import DrafterTrainLoop, Shared
from dflash.errors import Exit
from dflash.heartbeat import Heartbeat
from dflash.heldout import HeldOut, held_out_documents
from dflash.manifest import collect
from dflash.metrics import Waits
from dflash.prefetch import BatchSource, open_source, run_prefetch
from dflash.replicas import Exchange
from dflash.resolve import (
    check_devices,
    check_loggers,
    compile_backend,
    compute_dtype,
    drafter_shape,
    initial_drafter,
    shape_policy,
)
from dflash.routing import RoutedReceiver, Routes, indices, queue_depth, routes
from dflash.rundir import RunDirectory, check_inputs, check_place, check_shape, run_directory
from dflash.shapes import ShapePolicy, laid_out
from dflash.steps import StepPlan
from dflash.stop import StopRequest, on_signals
from dflash.target import Target, load_targets, run_target
from dflash.target_compile import compile_layers
from dflash.target_files import target_digest
from dflash.watched import watched

log = logging.getLogger(__name__)
AHEAD = 0.9


def train(config: TrainConfig) -> int:
    """Train as configured; returns the exit code. Everything that goes wrong is logged."""
    with run_directory(config) as directory:
        return failures.reported(lambda: _train(config, directory))


def _train(config: TrainConfig, directory: RunDirectory) -> int:
    run = open_run(config, directory)
    if run.plan.first_step == run.plan.total_steps:
        log.info("nothing to do: all %d steps are done", run.plan.total_steps)
        return Exit.OK
    return run.start(run.load())


def open_run(config: TrainConfig, directory: RunDirectory) -> "Run":
    """Check and resolve everything; reads the data, loads no weights. Raises DflashError."""
    manifest = collect(config_hash(config))
    log.info(manifest.first_line())
    check_devices(config)
    check_loggers(config)
    resume_from = directory.resume_from()
    shape = drafter_shape(config, resume_from.directory if resume_from else None)
    source = open_source(config, mask_token_id=shape.mask_token_id, vocab_size=shape.vocab_size)
    evaluates = config.evaluation.eval_every > 0
    held_out = held_out_documents(config, shape.vocab_size) if evaluates else []
    inputs = {
        "--data-dir": source.data.digest(),
        "--target-model": target_digest(Path(config.model.target_model)),
    }
    plan = StepPlan.of(
        len(source.plan),
        drafters=len(config.devices.drafter_gpus),
        grad_accum=config.optimizer.grad_accum,
        first_step=resume_from.progress.step if resume_from else 0,
    )
    if resume_from is not None:
        check_shape(resume_from, shape)
        check_inputs(resume_from, inputs)
        check_place(resume_from, resume_from.progress.step * plan.per_step)
    directory.write_description(manifest)
    log.info("steps: %d, micro-batches in each: %d", plan.total_steps, plan.per_step)
    backend = compile_backend(config)
    return Run(
        config,
        directory,
        directory.checkpoints(inputs),
        shape,
        source,
        plan,
        compute_dtype(config),
        backend,
        None if backend == "none" else shape_policy(config, source),
        resume_from,
        held_out,
    )


@dataclass(frozen=True)
class Models:
    """What is loaded: the target once for each of --target-gpus, and what the options ask for.

    `initial`: weights of --init-from; None for random ones, or those of the checkpoint resumed.
    """

    targets: list[Target]
    initial: Drafter | None
    held_out: HeldOut | None


@dataclass(frozen=True)
class Run:
    """Everything resolved; `start` starts the threads and waits for them."""

    config: TrainConfig
    directory: RunDirectory
    checkpoints: Checkpoints
    shape: DrafterConfig
    source: BatchSource
    plan: StepPlan
    dtype: torch.dtype
    backend: str
    shapes: ShapePolicy | None
    resume_from: TrainingState | None
    held_out: list[Completion]

    def load(self) -> "Models":
        """Load the weights. Raises DflashError, naming the option."""
        config = self.config
        if self.backend != "none":
            install_thread_isolation()
        initial = initial_drafter(config, self.shape) if self.resume_from is None else None
        names = _devices(config.devices.target_gpus)
        evaluates = bool(self.held_out)
        targets = load_targets(
            config.model.target_model,
            self.shape.target_layer_ids,
            self.dtype,
            # One more for the drafter that evaluates: its own hooks over the first one's weights.
            [*names, *names[:evaluates]],
            trust_remote_code=config.model.trust_remote_code,
        )
        held_out = HeldOut(targets.pop(), self.held_out) if evaluates else None
        return Models(targets, initial, held_out)

    def start(self, models: "Models") -> int:
        """Train; returns the exit code, or raises what the threads raised, root cause first."""
        run = self.config.run
        stop = StopRequest()
        group = TaskGroup("train", run.stop_grace_s)
        drafters, targets = self.plan.drafters, len(models.targets)
        names = [f"drafter-{i}" for i in range(drafters)] + [f"target-{i}" for i in range(targets)]
        gate = Gate(group.scope, names, run.start_timeout_s)
        compiled: Exchange[None] = Exchange(group.scope, len(names), run.start_timeout_s)
        exchange: Exchange[Any] = Exchange(group.scope, drafters, run.stall_timeout_s)
        reporter = self.directory.reporter(self.plan.first_step, self.plan.total_steps)
        shared = Shared(
            config=self.config,
            shape=self.shape,
            plan=self.plan,
            head=models.targets[0].head,
            dtype=self.dtype,
            backend=self.backend,
            shapes=self.shapes,
            compiled=compiled,
            exchange=exchange,
            summing=summing(_devices(self.config.devices.drafter_gpus), exchange),
            gate=gate,
            stop=stop,
            checkpoints=self.checkpoints,
            reporter=reporter,
            resume_from=self.resume_from,
            initial=models.initial,
            held_out=models.held_out,
        )
        beats = self._heartbeat()
        try:
            with (
                on_signals(stop, group.scope, gate),
                watched(self.directory.path, run, group.scope),
                group,
            ):
                self._start(group, beats, shared, models.targets)
        finally:
            reporter.close()
        return self._outcome(stop, group.scope.reason)

    def _start(
        self, group: TaskGroup, beats: Heartbeat, shared: Shared, targets: list[Target]
    ) -> None:
        """Make the channels and start every thread: prefetch-P, target-T, drafter-D."""

        def start(fn: Callable[..., object], *args: Any, name: str) -> None:
            group.start(beats.run, name, fn, *args, name=name)

        config, plan, gate = self.config, self.plan, shared.gate
        threads = config.data.num_prefetch_threads
        batches: Routes[Batch] = routes(group.scope, threads, len(targets), "batches", config.run)
        features: Routes[TargetFeatures] = routes(
            group.scope, len(targets), plan.drafters, "features", config.run
        )
        sample = self._warm_up_sample(targets[0])
        self._log_memory(sample, features[1])
        _watch(shared, batches, features)
        soft, drafters = config.objective.use_soft_labels, _devices(config.devices.drafter_gpus)
        pinned = any(device.type == "cuda" for device in drafters)
        lay_out = partial(laid_out, shapes=self.shapes, pinned=pinned)
        for rank, sender in enumerate(batches[0]):
            share = indices(rank, threads, plan.first_batch, plan.end_batch)
            start(run_prefetch, self.source, lay_out, sender, share, gate, name=f"prefetch-{rank}")
        for rank, target in enumerate(targets):
            share = indices(rank, len(targets), plan.first_batch, plan.end_batch)
            ends = (batches[1][rank], features[0][rank])
            ready = partial(self._get_ready, shared, rank, target)
            rest = (share, ready, gate, soft, drafters)
            start(run_target, target, *ends, *rest, name=f"target-{rank}")
        for rank, device in enumerate(drafters):
            loop = DrafterTrainLoop(shared, rank, device, features[1][rank])
            start(loop.run, sample, name=loop.name)

    def compile_target(self, target: Target, phase: Callable[[str], None]) -> None:
        """For the calling thread, which is to run it; nothing with `--compile none`."""
        data = self.config.data
        if self.backend != "none":
            compile_layers(
                target,
                self.backend,
                longest=min(data.max_seq_len, data.token_budget // 2),
                allow_late=self.config.devices.late_compile == "allow",
                phase=phase,
            )

    def _get_ready(self, shared: Shared, rank: int, target: Target) -> None:
        """What a target's thread does before the gate."""
        name = f"target-{rank}"
        self.compile_target(target, partial(shared.phase, name))
        shared.compiled.gather(self.plan.drafters + rank, None, "compiled layers")
        shared.gate.arrive(name)

    def _heartbeat(self) -> Heartbeat:
        """One slot for each loop. The watchdog is a little ahead of those who wait for a loop."""
        run, threads = self.config.run, self.config.data.num_prefetch_threads
        counts = {
            "prefetch": threads,
            "target": len(self.config.devices.target_gpus),
            "drafter": self.plan.drafters,
        }
        return Heartbeat(
            self.directory.path / heartbeat.FILE,
            [f"{stage}-{rank}" for stage, count in counts.items() for rank in range(count)],
            start_limit_s=AHEAD * run.start_timeout_s,
            limit_s=AHEAD * run.stall_timeout_s,
        )

    def _warm_up_sample(self, target: Target) -> TargetFeatures:
        """Features for the drafters to warm up with, before any other thread runs."""
        batch = self.source.batch(self.plan.first_batch)
        return target.features(batch, soft_labels=self.config.objective.use_soft_labels)

    def _log_memory(
        self, sample: TargetFeatures, receivers: Sequence[RoutedReceiver[TargetFeatures]]
    ) -> None:
        mib_per_token = sample.nbytes / len(sample.batch.tokens_T) / 2**20
        queued = Counter[str]()
        for device, receiver in zip(self.config.devices.drafter_gpus, receivers, strict=True):
            queued[device] += receiver.capacity
        for device, batches in queued.items():
            most_mib = batches * self.config.data.token_budget * mib_per_token
            log.info("%s: queue of features at most %d long, %.1f MiB", device, batches, most_mib)

    def _outcome(self, stop: StopRequest, reason: str | None) -> int:
        total, output = self.plan.total_steps, self.config.run.output_dir
        if stop.stopped_after is not None and stop.stopped_after < total:
            log.warning(
                "stopped at step %d of %d; resume with --resume auto", stop.stopped_after, total
            )
            return Exit.STOPPED
        if reason is not None and stop.stopped_after is None:
            log.error("%s; resume from the last checkpoint with --resume auto", reason)
            return Exit.INTERRUPTED
        log.info("finished: %d steps, in %s", total, output)
        return Exit.OK


def _watch(shared: Shared, batches: Routes[Batch], features: Routes[TargetFeatures]) -> None:
    """Tell the reporter where each stage's threads wait, and what is queued between them."""
    stages: dict[str, list[list[Waits]]] = {
        "prefetch": [[sender] for sender in batches[0]],
        "target": [list(ends) for ends in zip(batches[1], features[0], strict=True)],
        "drafter": [
            [receiver, shared.exchange.waits[rank]] for rank, receiver in enumerate(features[1])
        ],
    }
    queues = {
        "batches": partial(queue_depth, batches[1]),
        "features": partial(queue_depth, features[1]),
    }
    shared.reporter.watch(stages, queues)


def _devices(names: tuple[str, ...]) -> list[torch.device]:
    return [torch.device(name) for name in names]
