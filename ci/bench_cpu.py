"""What a training step costs on the CPU, as ratios: against speculators' model, and as it grows.

    python ci/bench_cpu.py [--speculators-python /path/to/a/venv/bin/python]

One torch thread, float32, random weights; medians. A virtual environment of its own holds
speculators, which wants other versions than this project. No number here is asserted anywhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_steps import TARGET, Shape, our_step, peak_kib, reset_peak_kib, seconds

ROOT = Path(__file__).parents[1]


def against_speculators(python: str | None) -> None:
    """Seconds of both, in two processes one after the other, so that neither disturbs the other."""
    if python is None:
        print("speculators: not measured; give --speculators-python of an environment that has it")
        return
    for shape in (Shape(), Shape(anchors=128), Shape(tokens=1024, vocabulary=32768)):
        ours, theirs = (
            _in_process(exe, shape, who)
            for exe, who in ((sys.executable, "ours"), (python, "theirs"))
        )
        if "error" in theirs:
            print(f"speculators: could not be run: {theirs['error']}")
            return
        speeds = [shape.tokens / found["seconds"] for found in (ours, theirs)]
        print(
            f"T {shape.tokens} N {shape.anchors} B {shape.block} V {shape.vocabulary}: ours"
            f" {speeds[0]:.0f} tok/s, speculators {theirs['version']} {speeds[1]:.0f} tok/s:"
            f" {speeds[0] / speeds[1]:.2f} times; peak memory {ours['peak_mib']:.0f} and"
            f" {theirs['peak_mib']:.0f} MiB: {ours['peak_mib'] / theirs['peak_mib']:.2f} times"
        )


def _in_process(python: str, shape: Shape, who: str) -> dict:
    done = subprocess.run(
        [python, Path(__file__).with_name("bench_steps.py"), who, json.dumps(shape.__dict__)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"error": lines[-1]}


def growth() -> None:
    """Cost of a step as one of its sizes doubles, relative to the smallest."""
    base = Shape()
    for field, values in {
        "anchors": (32, 64, 128, 256),
        "block": (4, 8, 16, 32),
        "tokens": (256, 512, 1024, 2048),
    }.items():
        costs = [seconds(our_step(replace(base, **{field: value}))) for value in values]
        ratios = "  ".join(
            f"{value}: {cost / costs[0]:.2f}" for value, cost in zip(values, costs, strict=True)
        )
        print(f"step's cost by {field:8} {ratios}")


def loss_memory() -> None:
    """What the loss adds to the memory as anchors grow: ours, and with all logits kept."""
    from dflash.anchors import Blocks
    from dflash.asked import AskedSlots
    from dflash.losses import Objective, block_losses

    block, hidden, vocabulary = 8, 256, 32768
    head_VD = torch.randn(vocabulary, hidden) * 0.02

    def chunked(hidden_PD: torch.Tensor, labels_NB: torch.Tensor) -> None:
        anchor_N = torch.arange(len(labels_NB))
        blocks = Blocks(anchor_N, labels_NB, labels_NB, torch.ones(labels_NB.shape))
        block_losses(hidden_PD, head_VD, AskedSlots.of(blocks), Objective(0.0, 1.0, 0.0))

    def with_logits(hidden_PD: torch.Tensor, labels_NB: torch.Tensor) -> None:
        logits_PV = hidden_PD.requires_grad_() @ head_VD.T
        loss = torch.nn.functional.cross_entropy(logits_PV, labels_NB.flatten(), reduction="sum")
        loss.backward()

    for anchors in (32, 64, 128, 256):

        def measure(loss, anchors=anchors) -> float:
            hidden_PD = torch.randn(anchors * block, hidden)
            labels_NB = torch.randint(0, vocabulary, (anchors, block))
            return _added_mib(lambda: loss(hidden_PD, labels_NB))

        ours, logits = measure(chunked), measure(with_logits)
        print(
            f"loss's memory, {anchors:3} anchors: {ours:5.0f} MiB, with all logits {logits:5.0f}"
            f" MiB: {ours / logits:.2f} times"
        )


def _added_mib(work: Callable[[], object]) -> float:
    """How much the peak of a fork's memory rises while it does `work`."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        before_kib = reset_peak_kib()
        work()
        added = peak_kib() - before_kib
        os.write(writing, str(added).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        added_kib = int(pipe.read())
    os.waitpid(child, 0)
    return added_kib / 1024


def idle_share() -> None:
    """The share of a real run's time in which neither the target nor a drafter computes."""
    from dflash import drafter_loop
    from dflash.config import TrainConfig
    from dflash.prepare import PrepareOptions, prepare
    from dflash.target import Target
    from dflash.trainer import train

    busy: list[tuple[float, float]] = []
    _record(Target, "features", busy)
    _record(drafter_loop.DrafterTrainLoop, "_micro_batch", busy)
    _record(drafter_loop, "apply_step", busy)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prompts = [
            f"def {verb}_{n}(self):\n" for verb in ("open", "read", "send") for n in range(9)
        ]
        (work / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        prepare(
            PrepareOptions(
                source=work / "p.jsonl",
                target_model=TARGET,
                output_dir=work / "data",
                max_seq_len=128,
                max_new_tokens=64,
                batch_size=27,
                temperature=0.0,
                top_p=1.0,
                seed=0,
                chat_template=False,
                device="cpu",
                dtype="float32",
                trust_remote_code=False,
            )
        )
        busy.clear()
        options = {
            "model": {"target-model": str(TARGET), "num-draft-layers": 2, "block-size": 4},
            "data": {"data-dir": str(work / "data"), "max-seq-len": 128, "token-budget": 512},
            "devices": {"target-gpus": "cpu", "drafter-gpus": "cpu"},
            "optimizer": {"epochs": 12},
            "run": {"output-dir": str(work / "run")},
            "logging": {"log-format": "lines", "log-interval": 1000},
        }
        assert train(TrainConfig.from_dict(options)) == 0
    warm = sorted(busy)[3:]  # the warm-up sample, the warm-up, the first batch
    begin, end = warm[0][0], max(stop for _, stop in warm)
    print(f"neither stage computes {1 - _covered(warm) / (end - begin):.1%} of {end - begin:.1f} s")


def _record(owner: object, name: str, busy: list[tuple[float, float]]) -> None:
    real, lock = getattr(owner, name), threading.Lock()

    def recorded(*args, **kwargs):
        started_s = time.monotonic()
        try:
            return real(*args, **kwargs)
        finally:
            with lock:
                busy.append((started_s, time.monotonic()))

    setattr(owner, name, recorded)


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--speculators-python", help="python of an environment with speculators")
    arguments = parser.parse_args()
    loss_memory()
    growth()
    against_speculators(arguments.speculators_python)
    idle_share()
