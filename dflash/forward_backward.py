"""Forward and backward of a micro-batch on one drafter replica."""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dflash.anchors import Blocks
from dflash.batches import Batch, TargetFeatures
from dflash.compile import Seal, backward_on_this_thread, compiled_for_this_thread
from dflash.config import TrainConfig
from dflash.drafter import EAGER, Drafter, Regions, autocast
from dflash.gradients import Gradients
from dflash.losses import LossSums, Objective, Teacher, block_losses
from dflash.randomness import NOISE, generator
from dflash.shapes import Padded, ShapePolicy
from dflash.target import FrozenHead

log = logging.getLogger(__name__)


class ForwardBackward:
    """One replica's drafter with its objective, on the calling thread.

    With `shapes`, the layers are compiled, each size by itself, and micro-batches are padded to
    these sizes; without, they run eager at whatever size comes.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: FrozenHead,
        config: TrainConfig,
        dtype: torch.dtype,
        shapes: ShapePolicy | None = None,
        backend: str = "inductor",
    ) -> None:
        self.drafter, self.head, self.dtype, self.shapes = drafter, head, dtype, shapes
        self.parameters = list(drafter.parameters())
        self.device = self.parameters[0].device
        self.seed, self.noise_type = config.data.seed, config.objective.noise_type
        objective = config.objective
        self.objective = Objective(
            objective.kl_weight, objective.kl_temperature, objective.cap_lambda
        )
        self.seal = Seal(allow_late=config.devices.late_compile == "allow")
        self.regions = {} if shapes is None else self._compiled(shapes, backend)

    def warm_up(self, sample: TargetFeatures, phase: Callable[[str], None]) -> None:
        """Compile for every size, forward and backward, then run the sample; nothing of it stays.

        After it, a compile is refused or reported: see `Seal`. `phase` is told what goes on.
        """
        lengths = self.shapes.contexts if self.shapes and sample.features_TF is not None else ()
        for i, length in enumerate(lengths):
            phase(f"compiling for {length} context tokens, {i + 1} of {len(lengths)}")
            started_s = time.monotonic()
            self._run_example(length, sample)
            log.info(
                "compiled for %d context tokens, %d of %d, in %.1f s",
                length,
                i + 1,
                len(lengths),
                time.monotonic() - started_s,
            )
        phase("warming up")
        self(sample, 0.0, self.new_gradients())
        self.seal.close()

    def new_gradients(self) -> Gradients:
        """Accumulators for a step."""
        return Gradients.zeros(self.parameters, with_cap=self.objective.cap_lambda > 0)

    def __call__(self, features: TargetFeatures, noise: float, gradients: Gradients) -> LossSums:
        """Loss sums; adds to `gradients`. A filler costs and adds nothing.

        Args:
            noise: scale of the noise on the context features.
        """
        if features.features_TF is None:
            return self._no_sums()
        features_TF = self._noisy(features.features_TF, features.batch, noise)
        teacher_TD = features.teacher_TD
        if self.shapes is None:
            batch = features.batch
            eager = Padded(features_TF, batch.document_T, batch.position_T, [batch.blocks])
            return self._run(eager, EAGER, gradients, teacher_TD)
        padded = self.shapes.padded(features_TF, features.batch)
        return self._run(padded, self.regions[len(padded.features_TF)], gradients, teacher_TD)

    def _run(
        self,
        padded: Padded,
        regions: Regions,
        gradients: Gradients,
        teacher_TD: Tensor | None,
    ) -> LossSums:
        """The chunks share the context: its gradients meet at a leaf, and go on once."""
        with autocast(self.device, self.dtype):
            context_TD = self.drafter.context(padded.features_TF)
        leaf_TD = context_TD.detach().requires_grad_()
        leaves, per_leaf = [*self.parameters, leaf_TD], gradients.with_leaf(leaf_TD)
        sums = self._no_sums()
        for blocks in padded.chunks:
            with autocast(self.device, self.dtype):
                hidden_PD = self.drafter.draft(
                    self.head.embedding_VD[blocks.inputs_NB.flatten()],
                    leaf_TD,
                    padded.document_T,
                    padded.position_T,
                    blocks.anchor_N,
                    regions,
                )
            main, cap, part = block_losses(
                hidden_PD,
                self.head.head_VD,
                blocks.labels_NB,
                blocks.weights_NB,
                self.objective,
                _teacher(teacher_TD, blocks),
            )
            sums += part
            with backward_on_this_thread():
                per_leaf.add(main, cap, leaves)
        with backward_on_this_thread():
            gradients.add_through(context_TD, per_leaf, self.parameters)
        return sums

    def _run_example(self, length: int, sample: TargetFeatures) -> None:
        assert self.shapes is not None and sample.features_TF is not None
        example = self.shapes.example(length, sample.features_TF)
        self._run(example, self.regions[length], self.new_gradients(), None)

    def _compiled(self, shapes: ShapePolicy, backend: str) -> dict[int, Regions]:
        """Regions for each length of the context: each code object meets one size only."""

        def compiled(function: Callable[..., object]) -> Callable[..., object]:
            return compiled_for_this_thread(function, self.seal.backend(backend))

        tiled = self.device.type == "cuda" and backend == "inductor"
        return {length: Regions.compiled(compiled, tiled=tiled) for length in shapes.contexts}

    def _noisy(self, features_TF: Tensor, batch: Batch, scale: float) -> Tensor:
        if not scale:
            return features_TF
        random = generator(self.seed, NOISE, batch.epoch, batch.index, features_TF.device)
        noise_TF = torch.empty_like(features_TF)
        if self.noise_type == "uniform":
            noise_TF.uniform_(-scale, scale, generator=random)
        else:
            noise_TF.normal_(0.0, scale, generator=random)
        return features_TF + noise_TF

    def _no_sums(self) -> LossSums:
        return LossSums.zero(self.drafter.config.block_size, self.device)


def _teacher(teacher_TD: Tensor | None, blocks: Blocks) -> Teacher | None:
    """Slot k of the block at anchor a learns from the target's output at a + k - 1."""
    if teacher_TD is None:
        return None
    slot_B = torch.arange(blocks.inputs_NB.shape[1], device=blocks.anchor_N.device)
    row_NB = (blocks.anchor_N[:, None] + slot_B - 1).clamp(0, len(teacher_TD) - 1)
    return Teacher(teacher_TD, row_NB.flatten())
