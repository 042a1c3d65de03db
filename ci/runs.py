"""Runs of `dflash train` with a random target on random completions; the same stages by turns."""

import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import Shape

if TYPE_CHECKING:
    from dflash.drafter_config import DrafterConfig
    from dflash.target import Target

ROOT = Path(__file__).parents[1]
STAGES = ("prefetch", "target", "drafter")
MASK_TOKEN_ID = 1


@dataclass(frozen=True)
class Sizes:
    """The target, and the completions: so many rows of one length in a micro-batch."""

    hidden: int
    layers: int
    head_dim: int
    vocabulary: int
    length: int
    rows: int
    anchors: int


@dataclass(frozen=True)
class Devices:
    """Where the stages run, as --target-gpus and --drafter-gpus name them."""

    targets: str
    drafters: str

    @property
    def micro_batches(self) -> int:
        """Of each drafter in a step: two in all, however many drafters there are."""
        return 2 // len(self.drafters.split(","))

    def most(self, target: float) -> float:
        """How much faster than by turns, if the busiest device never waited.

        target: its part of the work of both stages, by turns.
        """
        targets, drafters = self.targets.split(","), self.drafters.split(",")
        load: dict[str, float] = defaultdict(float)
        for devices, part in ((targets, target), (drafters, 1 - target)):
            for device in devices:
                load[device] += part / len(devices)
        return 1 / max(load.values())


def make_target(directory: Path, sizes: Sizes, device: str) -> None:
    """A Qwen3 with random weights, drawn on the device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // sizes.head_dim,
        num_key_value_heads=sizes.hidden // sizes.head_dim // 2,
        head_dim=sizes.head_dim,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def make_data(directory: Path, sizes: Sizes, micro_batches: int) -> None:
    """Random completions of one length, a quarter of each a prompt."""
    import numpy as np

    from dflash.data.completions import Completion, write_completions

    random = np.random.default_rng(0)
    prompt = sizes.length // 4
    mask = [0] * prompt + [1] * (sizes.length - prompt)
    done = []
    for i in range(micro_batches * sizes.rows):
        tokens = random.integers(2, sizes.vocabulary, sizes.length).tolist()
        done.append(Completion(str(i), "", tokens, mask))
    write_completions(directory, done, {})


def train(target: Path, data: Path, output: Path, sizes: Sizes, devices: Devices) -> dict:
    """Tokens per second and each stage's waits, of a run's second half, when all is warm."""
    from dflash.compare import read_metrics

    options = {
        "--target-model": target,
        "--data-dir": data,
        "--output-dir": output,
        "--target-gpus": devices.targets,
        "--drafter-gpus": devices.drafters,
        "--mask-token-id": MASK_TOKEN_ID,
        "--epochs": 1,
        "--token-budget": sizes.rows * sizes.length,
        "--max-seq-len": sizes.length,
        "--max-anchors": sizes.anchors,
        "--grad-accum": devices.micro_batches,
        "--log-interval": 1,
    }
    command = [sys.executable, "-m", "dflash", "train"]
    command += [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    rows = list(read_metrics(output).values())
    first, *rest = rows[len(rows) // 2 :]
    seconds = rest[-1]["elapsed_s"] - first["elapsed_s"]
    waits = {stage: statistics.mean(row["stall"][stage] for row in rest) for stage in STAGES}
    return {**waits, "tokens_per_s": sum(row["tokens"] for row in rest) / seconds}


def by_turns(finished: Path, output: Path) -> dict[str, float]:
    """Tokens per second of a finished run's stages, one after another in one thread.

    Returns that, the part of the time that the target took, and its part of the operations.
    Batches are made before: the prefetch threads of the run do that beside everything else.
    """
    import torch
    from clock import seconds
    from ours import DrafterStep

    from dflash.config import TrainConfig
    from dflash.drafter import Drafter
    from dflash.rundir import run_directory
    from dflash.shapes import laid_out
    from dflash.trainer import open_run

    config = TrainConfig.from_toml(finished / "run.toml")
    config = replace(config, run=replace(config.run, output_dir=str(output)))
    device = torch.device(config.devices.drafter_gpus[0])
    with run_directory(config) as directory:
        run = open_run(config, directory)
        (target,) = run.load().targets
        run.compile_target(target, lambda _phase: None)
        with device:
            drafter = Drafter(run.shape)
        head = target.head.to(device, run.dtype)
        step = DrafterStep(drafter, head, config, run.dtype, run.shapes)
        pinned = device.type == "cuda"
        made = (run.source.batch(i) for i in range(run.plan.per_step))
        batches = [laid_out(batch, run.shapes, pinned=pinned) for batch in made]
        features: list = []

        def forward() -> None:
            features[:] = [target.features(b, soft_labels=False) for b in batches]

        forward()
        step.warm_up(features[0])
        taken = [
            (seconds(forward, device), seconds(lambda: step(features), device)) for _ in range(8)
        ]
    target_s, drafter_s = (statistics.median(times) for times in zip(*taken[2:], strict=True))
    tokens = sum(len(b.tokens_T) for b in batches)
    both_s = target_s + drafter_s
    length = batches[0].lengths[0]
    ours = target_flops(target, tokens, length)
    documents = tokens // length
    anchors = sum(len(b.blocks.anchor_N) for b in batches) // documents
    theirs = shape_of(run.shape, documents, length, anchors).flops
    return {
        "tokens_per_s": tokens / both_s,
        "target": target_s / both_s,
        "target_flops": ours / (ours + theirs),
    }


def target_flops(target: "Target", tokens: int, length: int) -> float:
    """Operations of the target's forward pass up to the last captured layer.

    A token attends to half of its document on average.
    """
    config, layers = target.text_config, target.layers[: max(target.layer_ids) + 1]
    weights = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    queries = config.num_attention_heads * config.head_dim
    return tokens * (2 * weights + len(layers) * 4 * (length / 2) * queries)


def shape_of(drafter: "DrafterConfig", documents: int, length: int, anchors: int) -> Shape:
    """The sizes of a step of this drafter over documents of one length."""
    return Shape(
        name="run",
        documents=documents,
        tokens=length,
        anchors=anchors,
        block=drafter.block_size,
        hidden=drafter.hidden_size,
        intermediate=drafter.intermediate_size,
        layers=drafter.num_layers,
        heads=drafter.num_heads,
        kv_heads=drafter.num_key_value_heads,
        head_dim=drafter.head_dim,
        captured=len(drafter.target_layer_ids),
        vocabulary=drafter.vocab_size,
    )
