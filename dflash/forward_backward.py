"""Forward and backward of a micro-batch on one drafter replica."""

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.batches import Batch, TargetFeatures
from dflash.compile import (
    Seal,
    compiled_for_this_thread,
    keep_less_for_backward,
    let_backwards_run_twice,
)
from dflash.config import TrainConfig
from dflash.cuda_graphs import GraphedPasses, capturing
from dflash.drafter import Drafter
from dflash.gradients import Gradients, GradientSums
from dflash.layers import EAGER, HowLayersRun
from dflash.layout import Layout
from dflash.losses import LossSums, Objective, block_losses
from dflash.passes import EagerPasses, Passes
from dflash.randomness import NOISE, generator
from dflash.shapes import ShapePolicy, Size, layout_of
from dflash.target import FrozenHead

log = logging.getLogger(__name__)
TIMED = 5  # micro-batches with and without CUDA graphs
WORTHWHILE = 0.97
"""Graphs are used where they need at most so much of the time without: they hold memory."""


class ForwardBackward:
    """One replica's drafter with its objective, on the calling thread.

    Computes with a copy of the float32 weights in the target's precision, which whoever changes the
    weights brings up to date; gradients add up in float32. With `shapes`, the layers are compiled,
    each size by itself, and micro-batches are padded to these sizes; without, they run eager at
    whatever size comes.
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
        self.drafter, self.head, self.shapes = drafter, head, shapes
        self.working = drafter if dtype == torch.float32 else copy.deepcopy(drafter).to(dtype)
        self.device = head.embedding_VD.device
        self.seed, self.noise_type = config.data.seed, config.objective.noise_type
        objective = config.objective
        self.objective = Objective(
            objective.kl_weight, objective.kl_temperature, objective.cap_lambda
        )
        self.sums = GradientSums(
            list(drafter.parameters()),
            with_cap=objective.cap_lambda > 0,
            shared=len(config.devices.drafter_gpus) > 1,
        )
        self.seal = Seal(allow_late=config.devices.late_compile == "allow")
        self.graphs = config.devices.cuda_graphs if self.device.type == "cuda" else "off"
        self.passes: dict[int, EagerPasses] = {}
        self.graphed: dict[int, GraphedPasses] = {}
        self.losses: Callable[..., Any] | None = None
        if shapes is not None:
            self._compile(shapes, backend)

    def _compile(self, shapes: ShapePolicy, backend: str) -> None:
        """Passes for each length of the context: each code object meets one size only."""
        if self.sums.with_cap:
            let_backwards_run_twice()

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return compiled_for_this_thread(function, self.seal.backend(backend))

        on_gpu = self.device.type == "cuda"
        for size in shapes.sizes:
            how = HowLayersRun.compiled(compiled, tiled=on_gpu and backend == "inductor")
            self.passes[size.context] = self._eager_passes(how)
        if on_gpu:
            keep_less_for_backward()
            from dflash.loss_kernel import chunk_losses  # needs Triton, which comes with CUDA

            self.losses = chunk_losses

    def _eager_passes(self, how: HowLayersRun) -> EagerPasses:
        return EagerPasses(self.working, self.head.embedding_VD, how, self.sums)

    def warm_up(
        self,
        sample: TargetFeatures,
        phase: Callable[[str], None],
        others_have_compiled: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile for every size, forward and backward, then run the sample; nothing of it stays.

        After it, a compile is refused or reported: see `Seal`. `phase` is told what goes on.
        `others_have_compiled` waits for those who compile in this process: see `cuda_graphs`.
        """
        sizes = self.shapes.sizes if self.shapes and sample.features_TF is not None else ()
        for i, size in enumerate(reversed(sizes)):
            phase(f"compiling for {size.context} context tokens, {i + 1} of {len(sizes)}")
            started_s = time.monotonic()
            self.start_step()
            self._run(*self._example(size, sample))
            log.info(
                "compiled for %d context tokens, %d of %d, in %.1f s",
                size.context,
                i + 1,
                len(sizes),
                time.monotonic() - started_s,
            )
        others_have_compiled()
        if self.graphs != "off":
            self._capture(sizes, sample, phase)
        phase("warming up")
        self.start_step()
        self(sample, 0.0)
        self.seal.close()

    @property
    def copies(self) -> list[Tensor] | None:
        """The weights that it computes with, where they are not the drafter's own."""
        if self.working is self.drafter:
            return None
        return [parameter.data for parameter in self.working.parameters()]

    def start_step(self) -> None:
        """Forget the gradients so far."""
        self.sums.start()

    def finish_step(self) -> Gradients:
        """The gradients since `start_step`, which hold until the next micro-batch."""
        return self.sums.finish()

    def __call__(self, features: TargetFeatures, noise: float) -> LossSums:
        """Loss sums; adds to the gradients. A filler costs and adds nothing.

        Args:
            noise: scale of the noise on the context features.
        """
        if features.features_TF is None:
            return self.no_sums()
        batch = features.batch
        layout = layout_of(batch, self.shapes).to(self.device)
        features_TF = self._noisy(features.features_TF, batch, noise)
        features_TF = F.pad(features_TF, (0, 0, 0, len(layout.document_T) - len(features_TF)))
        return self._run(features_TF, layout, features.teacher_TD)

    def _run(self, features_TF: Tensor, layout: Layout, teacher_TD: Tensor | None) -> LossSums:
        passes = self._passes(len(features_TF), layout)
        passes.begin(features_TF, layout)
        sums = self.no_sums()
        for chunk in layout.chunks:
            main_PD, cap_PD, part = block_losses(
                passes.draft(chunk),
                self.head.head_VD,
                chunk.asked,
                self.objective,
                teacher_TD,
                self.losses,
            )
            passes.backward(main_PD, cap_PD)
            sums += part
        passes.end()
        return sums

    def _passes(self, length: int, layout: Layout) -> Passes:
        if not self.passes:
            return self._eager_passes(EAGER)
        graphed = self.graphed.get(length)
        return graphed if graphed and graphed.fits(layout) else self.passes[length]

    def _example(self, size: Size, sample: TargetFeatures) -> tuple[Tensor, Layout, Tensor | None]:
        """What `_run` takes, for a micro-batch of that size with one chunk."""
        assert self.shapes is not None and sample.features_TF is not None
        teacher_TD = sample.teacher_TD
        return (
            torch.zeros_like(sample.features_TF[:1]).expand(size.context, -1),
            self.shapes.example(size).to(self.device),
            None if teacher_TD is None else torch.zeros_like(teacher_TD[:1]),
        )

    def _capture(
        self, sizes: Sequence[Size], sample: TargetFeatures, phase: Callable[[str], None]
    ) -> None:
        """Replay CUDA graphs where that is faster, or wherever `--cuda-graphs on` wants it."""
        for size in reversed(sizes):
            phase(f"capturing CUDA graphs for {size.context} context tokens")
            with capturing():
                self._capture_one(size, sample)

    def _capture_one(self, size: Size, sample: TargetFeatures) -> None:
        example, length = self._example(size, sample), size.context
        eager_s = self._seconds(*example)
        self.graphed[length] = GraphedPasses(self.passes[length], *example[:2], self._pool())
        graphs_s = self._seconds(*example)
        used = self.graphs == "on" or graphs_s < WORTHWHILE * eager_s
        log.info(
            "CUDA graphs for %d context tokens: %.2f ms a micro-batch, without them %.2f: %s",
            length,
            1e3 * graphs_s,
            1e3 * eager_s,
            "used" if used else "not used",
        )
        if not used:
            del self.graphed[length]

    def _pool(self) -> Any:
        """That of the graphs in use: one whose graphs are all gone cannot be captured into."""
        pools = (graphed.pool for graphed in self.graphed.values())
        return next(pools, None) or torch.cuda.graph_pool_handle()

    def _seconds(self, *example: Any) -> float:
        """The fastest of a few micro-batches: whoever else is on the GPU can only slow one down."""
        times = []
        for _ in range(TIMED):
            torch.cuda.current_stream().synchronize()
            started_s = time.perf_counter()
            self.start_step()
            self._run(*example)
            torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - started_s)
        return min(times)

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

    def no_sums(self) -> LossSums:
        """The sums of no micro-batch, on this replica's device."""
        return LossSums.zero(self.drafter.config.block_size, self.device)
