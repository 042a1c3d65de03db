"""Training on one against two GPUs, and what the link between them does; asserts nothing.

    python ci/bench_gpus.py --steps 12

Makes a target with random weights and random completions in a scratch directory, then runs
`dflash train` in each layout and prints tokens/s, the share of time that each stage waits, and the
ratio to the first layout. Needs CUDA; layouts for more GPUs than there are, are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUTS = (("0", "0"), ("0", "1"), ("0", "0,1"), ("0,1", "0,1"))
STAGES = ("prefetch", "target", "drafter")
VOCABULARY, LENGTH, ROWS = 65536, 1536, 10


def main() -> None:
    """Measure the link and every layout, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the target")
    parser.add_argument("--target-layers", type=int, default=24)
    arguments = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        print(f"copy of 1 GiB from GPU 0 to GPU 1: {link_gb_per_s():.0f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        target, data = Path(scratch, "target"), Path(scratch, "data")
        make_target(target, arguments.hidden, arguments.target_layers)
        make_data(data, rows=arguments.steps * 2 * ROWS)
        print("target  drafters  tokens/s  ratio  stall prefetch  target  drafter", flush=True)
        first = None
        for targets, drafters in LAYOUTS:
            if max(int(gpu) for gpu in f"{targets},{drafters}".split(",")) < gpus:
                run = train(target, data, Path(scratch, f"{targets}-{drafters}"), targets, drafters)
                first = first or run["tokens_per_s"]
                waits = "  ".join(f"{run[stage]:6.0%}" for stage in STAGES)
                print(
                    f"{targets:>6}  {drafters:>8}  {run['tokens_per_s']:8.0f}  "
                    f"{run['tokens_per_s'] / first:5.2f}          {waits}",
                    flush=True,
                )


def link_gb_per_s() -> float:
    """Median of ten copies of 1 GiB."""
    import torch

    source = torch.randn(2**28, device="cuda:0")
    there = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(12):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        started_s = time.perf_counter()
        there.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - started_s)
    return source.nbytes / statistics.median(times[2:]) / 1e9


def make_target(directory: Path, hidden: int, layers: int) -> None:
    """A Qwen3 with random weights, drawn on the GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 256,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        Qwen3ForCausalLM(config).save_pretrained(directory)


def make_data(directory: Path, rows: int) -> None:
    """Random completions of one length, a quarter of each a prompt."""
    import numpy as np

    from dflash.data.completions import Completion, write_completions

    random = np.random.default_rng(0)
    done = []
    for i in range(rows):
        mask = [0] * (LENGTH // 4) + [1] * (LENGTH - LENGTH // 4)
        tokens = random.integers(2, VOCABULARY, LENGTH).tolist()
        done.append(Completion(str(i), "", tokens, mask))
    write_completions(directory, done, {})


def train(target: Path, data: Path, output: Path, targets: str, drafters: str) -> dict[str, float]:
    """Figures of a run's second half, when everything is warm."""
    options = {
        "--target-model": target,
        "--data-dir": data,
        "--output-dir": output,
        "--target-gpus": targets,
        "--drafter-gpus": drafters,
        "--mask-token-id": 1,
        "--epochs": 1,
        "--token-budget": ROWS * LENGTH,
        "--max-seq-len": LENGTH,
        "--max-anchors": 128,
        "--grad-accum": 2 // len(drafters.split(",")),
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
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    first, *rest = rows[len(rows) // 2 :]
    seconds = rest[-1]["elapsed_s"] - first["elapsed_s"]
    waits = {stage: statistics.mean(row["stall"][stage] for row in rest) for stage in STAGES}
    return {**waits, "tokens_per_s": sum(row["tokens"] for row in rest) / seconds}


if __name__ == "__main__":
    main()
