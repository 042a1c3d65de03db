"""DrafterTrainLoop: one thread per drafter device, one replica of the drafter each."""

import logging
import time
from dataclasses import dataclass
from functools import partial, reduce
from operator import xor

import torch
from torch import Tensor

from dflash.batches import Batch, InputCheck, TargetFeatures
from dflash.checkpoint import Checkpoints, Progress, TrainingState
from dflash.compile import backward_on_this_thread, compiled_for_this_thread
from dflash.concurrency import Gate
from dflash.config import TrainConfig
from dflash.drafter import Drafter, DrafterConfig, Regions, autocast, build_drafter
from dflash.heldout import HeldOut
from dflash.losses import LossSums, Objective, Teacher, block_losses
from dflash.metrics import StepMetrics
from dflash.optim import Gradients, NonFiniteError, Schedule, apply_step, make_optimizer
from dflash.randomness import NOISE, generator
from dflash.replicas import Exchange, check_equal, weights_digest
from dflash.routing import RoutedReceiver
from dflash.sinks import Reporter
from dflash.steps import StepPlan
from dflash.stop import StopRequest
from dflash.target import FrozenHead

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contribution:
    """What one replica brings to a step."""

    gradients: Gradients
    sums: LossSums
    tokens: int
    draft_positions: int
    epoch: int
    stop: bool
    inputs: list[InputCheck]


@dataclass(frozen=True)
class Shared:
    """What all drafter threads have in common."""

    config: TrainConfig
    shape: DrafterConfig
    plan: StepPlan
    head: FrozenHead
    dtype: torch.dtype
    exchange: Exchange
    gate: Gate
    stop: StopRequest
    checkpoints: Checkpoints
    reporter: Reporter
    resume_from: TrainingState | None
    initial: Drafter | None
    held_out: HeldOut | None


class DrafterTrainLoop:
    """One replica: build, warm up, arrive at the gate, train. Rank 0 also reports and saves."""

    def __init__(
        self,
        shared: Shared,
        rank: int,
        device: torch.device,
        features: RoutedReceiver[TargetFeatures],
    ) -> None:
        self.shared, self.rank, self.device, self.features = shared, rank, device, features
        self.config = shared.config
        self.name = f"drafter-{rank}"
        objective = self.config.objective
        self.objective = Objective(
            objective.kl_weight, objective.kl_temperature, objective.cap_lambda
        )
        optimizer = self.config.optimizer
        self.schedule = Schedule(optimizer.lr, optimizer.warmup_ratio, shared.plan.total_steps)

    def run(self, sample: TargetFeatures) -> None:
        """Train to the end, or to the step at which somebody asked to stop.

        `sample` is a batch to warm up with: nothing of it stays.
        """
        with self.features:
            self._start(sample)
            for step in range(self.shared.plan.first_step, self.shared.plan.total_steps):
                if self._step(step):
                    return
            self._save(self.shared.plan.total_steps)

    def _start(self, sample: TargetFeatures) -> None:
        gate = self.shared.gate
        started_s = time.monotonic()
        gate.phase(self.name, "building the drafter")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.drafter = build_drafter(
            self.shared.shape, seed=self.config.data.seed, device=self.device
        )
        if self.shared.initial is not None:
            self.drafter.load_state_dict(self.shared.initial.state_dict())
        backend = self.config.devices.compile
        if backend != "none":
            self.drafter.regions = Regions.compiled(
                partial(compiled_for_this_thread, backend=backend)
            )
        self.optimizer = make_optimizer(self.drafter, self.config.optimizer)
        if self.shared.resume_from is not None:
            gate.phase(self.name, "loading the checkpoint")
            self.shared.resume_from.restore(self.drafter, self.optimizer)
        self.head = self.shared.head.to(self.device, self.shared.dtype)
        gate.phase(self.name, "warming up" if backend == "none" else f"compiling with {backend}")
        self._micro_batch(sample.to(self.device), 0.0, self._new_gradients())
        log.info("ready after %.1f s, compiled with: %s", time.monotonic() - started_s, backend)
        gate.arrive(self.name)
        gate.wait()

    def _step(self, step: int) -> bool:
        """One optimizer step over all replicas; True when it was the last because of a stop."""
        started = time.monotonic()
        parts = self.shared.exchange.gather(self.rank, self._contribute(step), "gradients")
        sums = sum((part.sums for part in parts[1:]), start=parts[0].sums)
        gradients = Gradients.total([part.gradients for part in parts], self.device)
        try:
            norm = apply_step(
                self.drafter,
                self.optimizer,
                gradients.normalised(sums, self.objective.cap_lambda),
                lr=self.schedule.lr(step),
                clip=self.config.optimizer.grad_clip,
                step=step,
            )
        except NonFiniteError as error:
            inputs = [check for part in parts for check in part.inputs]
            raise error.traced(inputs, targets=len(self.config.devices.target_gpus)) from None
        if self.rank == 0:
            seconds = time.monotonic() - started
            self._report(step, parts, sums, norm, seconds, self._evaluate(step + 1))
        return self._after_step(step + 1, stop=any(part.stop for part in parts))

    def _contribute(self, step: int) -> Contribution:
        plan = self.shared.plan
        gradients = self._new_gradients()
        sums = LossSums.zero(self.shared.shape.block_size, self.device)
        tokens = positions = epoch = 0
        inputs = []
        for i in range(plan.grad_accum):
            index = step * plan.per_step + i * plan.drafters + self.rank
            features = self.features.receive(index).to(self.device)
            inputs.append(InputCheck.of(features))
            sums += self._micro_batch(features, self._noise_scale(step), gradients)
            tokens += len(features.batch.tokens_T)
            positions += features.batch.blocks.labels_NB.numel()
            epoch = features.batch.epoch
        stop = self.shared.stop.is_set()
        return Contribution(gradients, sums, tokens, positions, epoch, stop, inputs)

    def _micro_batch(
        self, features: TargetFeatures, noise: float, gradients: Gradients
    ) -> LossSums:
        """Forward and backward of one micro-batch; a filler costs and adds nothing."""
        batch, shape = features.batch, self.shared.shape
        if features.features_TF is None:
            return LossSums.zero(shape.block_size, self.device)
        blocks = batch.blocks
        inputs_PD = self.head.embedding_VD[blocks.inputs_NB.flatten()]
        with autocast(self.device, self.shared.dtype):
            hidden_PD = self.drafter(
                inputs_PD,
                self._noisy(features.features_TF, batch, noise),
                batch.document_T,
                batch.position_T,
                blocks.anchor_N,
            )
        main, cap, sums = block_losses(
            hidden_PD,
            self.head.head_VD,
            blocks.labels_NB,
            blocks.weights_NB,
            self.objective,
            _teacher(features, shape.block_size),
        )
        with backward_on_this_thread():
            gradients.add(main, cap, self.drafter)
        return sums

    def _noisy(self, features_TF: Tensor, batch: Batch, scale: float) -> Tensor:
        if not scale:
            return features_TF
        random = generator(
            self.config.data.seed, NOISE, batch.epoch, batch.index, features_TF.device
        )
        noise_TF = torch.empty_like(features_TF)
        if self.config.objective.noise_type == "uniform":
            noise_TF.uniform_(-scale, scale, generator=random)
        else:
            noise_TF.normal_(0.0, scale, generator=random)
        return features_TF + noise_TF

    def _noise_scale(self, step: int) -> float:
        objective, total = self.config.objective, self.shared.plan.total_steps
        progress = step / max(1, total - 1)
        return objective.noise_start + progress * (objective.noise_end - objective.noise_start)

    def _after_step(self, done: int, *, stop: bool) -> bool:
        run = self.config.run
        if done % run.replica_check_interval == 0 or stop:
            self._check_replicas(done)
        if stop:
            self._save(done)
            # Nobody may leave before the state is on disk; then the stages upstream are let go.
            self.shared.exchange.gather(self.rank, None, "farewell")
            self.shared.stop.finish(self.shared.exchange.scope, done)
        elif done % run.save_interval == 0 and done < self.shared.plan.total_steps:
            self._save(done)
        return stop

    def _check_replicas(self, step: int) -> None:
        digests = self.shared.exchange.gather(self.rank, weights_digest(self.drafter), "digest")
        check_equal(digests, step)

    def _save(self, step: int) -> None:
        if self.rank == 0:
            progress = Progress(step, step * self.shared.plan.per_step)
            self.shared.checkpoints.save(self.drafter, self.optimizer, progress)

    def _evaluate(self, done: int) -> dict[str, float]:
        """Every --eval-every steps and after the last one; the other replicas wait meanwhile."""
        held_out, every = self.shared.held_out, self.config.evaluation.eval_every
        if held_out is None or (done % every and done < self.shared.plan.total_steps):
            return {}
        measured = held_out.measure(self.drafter, self.head)
        log.info(
            "step %d: held-out tau %.3f over %d rows by replay, which took %.1f s",
            done,
            measured["tau"],
            measured["documents"],
            measured["seconds"],
        )
        if measured["seconds"] > self.config.run.stall_timeout_s / 2:
            log.warning(
                "the other stages wait that long: lower --eval-rows, or raise "
                "--stall-timeout-s (%g)",
                self.config.run.stall_timeout_s,
            )
        return measured

    def _report(
        self,
        step: int,
        parts: list[Contribution],
        sums: LossSums,
        norm: float,
        seconds: float,
        evaluation: dict[str, float],
    ) -> None:
        metrics = StepMetrics.of(
            sums,
            self.objective,
            step=step + 1,
            epoch=max(part.epoch for part in parts),
            lr=self.schedule.lr(step),
            grad_norm=norm,
            noise=self._noise_scale(step),
            tokens=sum(part.tokens for part in parts),
            draft_positions=sum(part.draft_positions for part in parts),
            batches=reduce(xor, (c.batch.checksum for part in parts for c in part.inputs)),
            seconds=seconds,
            evaluation=evaluation,
        )
        self.shared.reporter.step(metrics)

    def _new_gradients(self) -> Gradients:
        return Gradients.zeros(self.drafter, with_cap=self.objective.cap_lambda > 0)


def _teacher(features: TargetFeatures, block_size: int) -> Teacher | None:
    """Slot k of the block at anchor a learns from the target's output at a + k - 1."""
    if features.teacher_TD is None:
        return None
    anchor_N = features.batch.blocks.anchor_N
    slot_B = torch.arange(block_size, device=anchor_N.device)
    row_NB = (anchor_N[:, None] + slot_B - 1).clamp(0, len(features.teacher_TD) - 1)
    return Teacher(features.teacher_TD, row_NB.flatten())
