"""A drafter thread's step at given sizes, through the product's own code, with random weights."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
from clock import wait, working_dtype
from shapes import GAMMA, Contender, Shape

from dflash.batches import Batch, TargetFeatures
from dflash.compile import install_thread_isolation
from dflash.config import TrainConfig
from dflash.drafter import Drafter
from dflash.drafter_config import DrafterConfig
from dflash.forward_backward import ForwardBackward
from dflash.optim import apply_step, make_optimizer
from dflash.shapes import ShapePolicy, laid_out
from dflash.size_choice import choose_sizes
from dflash.target import FrozenHead


class DrafterStep:
    """An optimizer step as a drafter thread of `dflash train` makes it, one replica alone.

    On a stream of its own, which a host that waits for the device waits for too.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: FrozenHead,
        config: TrainConfig,
        dtype: torch.dtype,
        shapes: ShapePolicy | None,
    ) -> None:
        if shapes is not None:
            install_thread_isolation()
        self.drafter, self.config = drafter, config
        self.optimizer = make_optimizer(drafter, config.optimizer)
        self.run = ForwardBackward(drafter, head, config, dtype, shapes)
        device = self.run.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        wait(device)  # for what was made on another stream

    def warm_up(
        self, sample: TargetFeatures, others_have_compiled: Callable[[], object] = lambda: None
    ) -> None:
        """Compile for every size."""
        with torch.cuda.stream(self.stream):
            received = sample.received(self.run.device)
            self.run.warm_up(received, lambda _phase: None, others_have_compiled)

    def __call__(self, micro_batches: list[TargetFeatures]) -> None:
        """Forward and backward of each, then clipping and the update."""
        with torch.cuda.stream(self.stream):
            self._step(micro_batches)

    def _step(self, micro_batches: list[TargetFeatures]) -> None:
        self.run.start_step()
        sums = self.run.no_sums()
        for features in micro_batches:
            sums += self.run(features.received(self.run.device), 0.0)
        total, divisor = self.run.finish_step().combined(sums, self.config.objective.cap_lambda)
        apply_step(
            self.drafter,
            self.optimizer,
            total,
            divisor=divisor,
            lr=6e-4,
            clip=1.0,
            step=0,
            copies=self.run.copies,
        )


def contender(shape: Shape, device: torch.device, name: str = "ours") -> Contender:
    """A step of one micro-batch, which is a new one each time, made before.

    `ours`: hard labels alone, as the peers have. `ours-soft`: with soft labels and CAP.
    `ours-whole`: all slots at once, as the peers run them, whatever memory that takes.
    """
    dtype, soft_labels = working_dtype(device), name == "ours-soft"
    config = train_config(
        objective={"cap-lambda": 0.1, "use-soft-labels": True} if soft_labels else {},
        devices={"draft-chunk": shape.slots} if name == "ours-whole" else {},
    )
    shapes = policy(shape, config) if device.type == "cuda" else None
    with device:
        drafter = Drafter(drafter_config(shape))
    tokens = shape.context_tokens
    features_TF = torch.randn(tokens, shape.captured * shape.hidden, device=device, dtype=dtype)
    teacher_TD = features_TF[:, : shape.hidden].contiguous() if soft_labels else None
    pinned = device.type == "cuda"
    batches = [laid_out(batch(shape, i), shapes, pinned=pinned) for i in range(4)]
    samples = [TargetFeatures(made, features_TF, teacher_TD) for made in batches]
    step = DrafterStep(drafter, random_head(shape, device), config, dtype, shapes)
    step.warm_up(samples[0])
    numbers = count()
    loss = "CE + KL + CAP" if soft_labels else "CE"
    compiled = (
        "eager layers" if shapes is None else f"Inductor, {shapes.sizes[-1].blocks} blocks at once"
    )
    return Contender(
        lambda: step([samples[next(numbers) % len(samples)]]),
        f"{loss}; float32 weights, computed in {dtype}; {compiled}; AdamW, with the weights' copy "
        "in one kernel on a GPU; batches made before, in other threads",
    )


def train_config(**sections: dict[str, Any]) -> TrainConfig:
    """The defaults of `dflash train`, but for these options of these sections."""
    needed = {
        "model": {"target-model": "-"},
        "data": {"data-dir": "-"},
        "run": {"output-dir": "-"},
    }
    return TrainConfig.from_dict(needed | sections)


def policy(shape: Shape, config: TrainConfig) -> ShapePolicy:
    """The sizes that a run of such micro-batches would be compiled for."""
    return choose_sizes(
        np.array([shape.context_tokens]),
        np.array([shape.documents * shape.anchors]),
        block_size=shape.block,
        chunk_slots=config.devices.draft_chunk,
    )


def drafter_config(shape: Shape) -> DrafterConfig:
    """Full attention; the last token id is the mask token."""
    return DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=40960,
        block_size=shape.block,
        mask_token_id=shape.vocabulary - 1,
        target_layer_ids=tuple(range(1, 1 + shape.captured)),
        num_target_layers=36,
        sliding_window=0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def random_head(shape: Shape, device: torch.device) -> FrozenHead:
    """Embeddings and lm_head of their own, as the larger targets have."""
    size, dtype = (shape.vocabulary, shape.hidden), working_dtype(device)
    tables = [torch.randn(size, device=device, dtype=dtype).mul_(0.02) for _ in range(2)]
    return FrozenHead(*tables)


def batch(shape: Shape, index: int) -> Batch:
    """Random documents, all supervised, with anchors as the prefetcher draws them."""
    random = torch.Generator().manual_seed(index)
    documents = [
        (
            torch.randint(0, shape.vocabulary - 1, (shape.tokens,), generator=random),
            torch.ones(shape.tokens, dtype=torch.bool),
        )
        for _ in range(shape.documents)
    ]
    return Batch.drawn(
        index,
        0,
        documents,
        block_size=shape.block,
        mask_token_id=shape.vocabulary - 1,
        gamma=GAMMA,
        per_document=shape.anchors,
        in_all=shape.documents * shape.anchors,
        generator=random,
    )
