"""DrafterTrainLoop: one thread per drafter device, one replica of the drafter each."""

import logging
import time
from dataclasses import dataclass
from functools import reduce
from operator import xor

import torch

from dflash.all_reduce import Summing
from dflash.batches import InputCheck, TargetFeatures
from dflash.checkpoint import Checkpoints, Progress, TrainingState
from dflash.concurrency import Gate
from dflash.config import TrainConfig
from dflash.drafter import Drafter, build_drafter
from dflash.drafter_config import DrafterConfig
from dflash.forward_backward import ForwardBackward
from dflash.gradients import Gradients
from dflash.heartbeat import started, waiting, working
from dflash.heldout import HeldOut
from dflash.losses import LossSums
from dflash.metrics import StepMetrics
from dflash.optim import NonFiniteError, Schedule, apply_step, make_optimizer
from dflash.replicas import Exchange, check_equal, weights_digest
from dflash.routing import RoutedReceiver
from dflash.shapes import ShapePolicy
from dflash.sinks import Reporter
from dflash.steps import StepPlan
from dflash.stop import StopRequest
from dflash.streams import HostCopy, Ready, own_stream
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
    ready: Ready


@dataclass(frozen=True)
class Shared:
    """What all drafter threads have in common, and targets as far as the gate."""

    config: TrainConfig
    shape: DrafterConfig
    plan: StepPlan
    head: FrozenHead
    dtype: torch.dtype
    backend: str
    shapes: ShapePolicy | None
    compiled: Exchange
    exchange: Exchange
    summing: Summing
    gate: Gate
    stop: StopRequest
    checkpoints: Checkpoints
    reporter: Reporter
    resume_from: TrainingState | None
    initial: Drafter | None
    held_out: HeldOut | None

    def phase(self, party: str, text: str) -> None:
        """What a party of the gate does from now on, in the calling thread. Raises Cancelled."""
        self.gate.phase(party, text)
        working(text)


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
        optimizer = self.config.optimizer
        self.schedule = Schedule(optimizer.lr, optimizer.warmup_ratio, shared.plan.total_steps)

    def run(self, sample: TargetFeatures) -> None:
        """Train to the end, or to the step at which somebody asked to stop.

        `sample` is a batch to warm up with: nothing of it stays.
        """
        with self.features, own_stream(self.device):
            self._start(sample)
            for step in range(self.shared.plan.first_step, self.shared.plan.total_steps):
                if self._step(step):
                    return
            self._save(self.shared.plan.total_steps)

    def _start(self, sample: TargetFeatures) -> None:
        started_s = time.monotonic()
        self._phase("building the drafter")
        self.drafter = build_drafter(
            self.shared.shape, seed=self.config.data.seed, device=self.device
        )
        if self.shared.initial is not None:
            self.drafter.load_state_dict(self.shared.initial.state_dict())
        self.optimizer = make_optimizer(self.drafter, self.config.optimizer)
        if self.shared.resume_from is not None:
            self._phase("loading the checkpoint")
            self.shared.resume_from.restore(self.drafter, self.optimizer)
        shared = self.shared
        self.head = shared.head.to(self.device, shared.dtype)
        self.forward_backward = ForwardBackward(
            self.drafter, self.head, self.config, shared.dtype, shared.shapes, shared.backend
        )
        self.forward_backward.warm_up(
            sample.received(self.device),
            self._phase,
            lambda: shared.compiled.gather(self.rank, None, "compiled layers"),
        )
        log.info(
            "ready after %.1f s, compiled with: %s", time.monotonic() - started_s, shared.backend
        )
        shared.gate.arrive(self.name)
        waiting("the start-up gate")
        shared.gate.wait()
        started()

    def _phase(self, text: str) -> None:
        self.shared.phase(self.name, text)

    def _step(self, step: int) -> bool:
        """One optimizer step over all replicas; True when it was the last because of a stop."""
        started = time.monotonic()
        parts = self.shared.exchange.gather(self.rank, self._contribute(step), "gradients")
        for part in parts:
            # Their memory need not be kept for this stream: `apply_step` makes the host wait for
            # it before the last reference to them is dropped.
            part.ready.wait(self.device, part.sums.weight.device)
        sums = sum((part.sums for part in parts), start=self.forward_backward.no_sums())
        # Queued before the update, so that the report need not wait until that is done.
        on_host = HostCopy(sums.flat())
        total = self.shared.summing(self.rank, [part.gradients for part in parts])
        gradients, divisor = total.combined(sums, self.config.objective.cap_lambda)
        working(f"update of step {step + 1}")
        try:
            norm = apply_step(
                self.drafter,
                self.optimizer,
                gradients,
                divisor=divisor,
                lr=self.schedule.lr(step),
                clip=self.config.optimizer.grad_clip,
                step=step,
                copies=self.forward_backward.copies,
            )
        except NonFiniteError as error:
            inputs = [check for part in parts for check in part.inputs]
            raise error.traced(inputs, targets=len(self.config.devices.target_gpus)) from None
        if self.rank == 0:
            seconds = time.monotonic() - started
            of_step = LossSums.of_flat(on_host.wait())
            self._report(step, parts, of_step, norm, seconds, self._evaluate(step + 1))
        return self._after_step(step + 1, stop=any(part.stop for part in parts))

    def _contribute(self, step: int) -> Contribution:
        plan = self.shared.plan
        self.forward_backward.start_step()
        sums = self.forward_backward.no_sums()
        tokens = positions = epoch = 0
        inputs = []
        for i in range(plan.grad_accum):
            index = step * plan.per_step + i * plan.drafters + self.rank
            features = self.features.receive(index).received(self.device)
            working(f"forward and backward of batch {index}")
            inputs.append(InputCheck.of(features))
            sums += self.forward_backward(features, self._noise_scale(step))
            tokens += len(features.batch.tokens_T)
            positions += features.batch.blocks.labels_NB.numel()
            epoch = features.batch.epoch
        stop = self.shared.stop.is_set()
        gradients = self.forward_backward.finish_step()
        ready = Ready.after(self.device)
        return Contribution(gradients, sums, tokens, positions, epoch, stop, inputs, ready)

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
            working(f"saving step {step}")
            progress = Progress(step, step * self.shared.plan.per_step)
            self.shared.checkpoints.save(self.drafter, self.optimizer, progress)

    def _evaluate(self, done: int) -> dict[str, float]:
        """Every --eval-every steps and after the last one; the other replicas wait meanwhile."""
        held_out, every = self.shared.held_out, self.config.evaluation.eval_every
        if held_out is None or (done % every and done < self.shared.plan.total_steps):
            return {}
        working(f"evaluation after step {done}")
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
            self.forward_backward.objective,
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
