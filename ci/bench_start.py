"""How long drafter threads compile before they are ready, cold and warm; asserts nothing.

    python ci/bench_start.py --drafters 1,3 --layers 5 --hidden 4096

Each row is a process of its own with a compile cache of its own: first empty (cold), then filled by
the row before (warm). Regional: each part of a layer is compiled once and used by all layers, as
`dflash train` does. Whole: the drafter's forward is one graph. Needs a CUDA device.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXTS = (1024,)
BLOCKS, BLOCK_SIZE, VOCABULARY = 256, 16, 32000


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", default="1,3", help="numbers of threads")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024, help="4096 for a drafter of Qwen3-8B")
    parser.add_argument("--child", nargs=2, metavar=("THREADS", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        threads, kind = arguments.child
        print(json.dumps(measure(int(threads), kind, arguments.layers, arguments.hidden)))
        return
    counts = [int(count) for count in arguments.drafters.split(",")]
    print(f"{'':20} {'cold s':>8} {'warm s':>8}  compiled cold, warm")
    seconds = {}
    for kind, threads in [("regional", count) for count in counts] + [("whole", 1)]:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (child(threads, kind, arguments, cache) for _ in range(2))
        seconds[kind, threads] = cold["seconds"]
        print(
            f"{kind + ', ' + str(threads):20} {cold['seconds']:8.1f} {warm['seconds']:8.1f}  "
            f"{cold['misses']}, {warm['misses']}",
            flush=True,
        )
    first = seconds["regional", counts[0]]
    for count in counts[1:]:
        print(f"{count} drafters / {counts[0]}, cold: {seconds['regional', count] / first:.2f}")
    print(f"regional / whole, cold: {first / seconds['whole', 1]:.2f}")


def child(threads: int, kind: str, size: argparse.Namespace, cache: str) -> dict[str, float]:
    """One row's figures, from a fresh process that uses this directory as its cache."""
    command = [sys.executable, __file__, "--child", str(threads), kind]
    command += ["--layers", str(size.layers), "--hidden", str(size.hidden)]
    done = subprocess.run(
        command,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=400,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(threads: int, kind: str, layers: int, hidden: int) -> dict[str, float]:
    """Seconds until all threads are ready, and how many graphs Inductor really compiled."""
    import torch
    from torch._dynamo.utils import counters

    from dflash.compile import install_thread_isolation

    torch.ones(1, device="cuda").sum().item()  # the device's start is not what is measured
    install_thread_isolation()
    warm_up = {"regional": regional, "whole": whole}[kind](layers, hidden)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            warm_up()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    started_s = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    seconds = time.monotonic() - started_s
    return {"seconds": seconds, "misses": counters["inductor"]["fxgraph_cache_miss"]}


def regional(layers: int, hidden: int) -> Callable[[], None]:
    """What a drafter thread of `dflash train` does before it arrives at the gate."""
    import torch

    from dflash.anchors import Blocks
    from dflash.batches import Batch, TargetFeatures
    from dflash.forward_backward import ForwardBackward
    from dflash.shapes import ShapePolicy
    from dflash.streams import own_stream

    device = torch.device("cuda:0")
    shapes = ShapePolicy(CONTEXTS, BLOCKS, BLOCK_SIZE)
    make = drafter_and_head(layers, hidden)

    def warm_up() -> None:
        with own_stream(device):
            drafter, head, config = make()
            nothing_T = torch.zeros(900, dtype=torch.long)
            anchor_N = torch.arange(BLOCKS)
            blocks_NB = nothing_T.new_zeros(BLOCKS, BLOCK_SIZE)
            blocks = Blocks(anchor_N, blocks_NB, blocks_NB, blocks_NB.float())
            batch = Batch(0, 0, nothing_T, (900,), nothing_T, nothing_T, blocks)
            features_TF = torch.randn(900, 2 * hidden, device=device, dtype=torch.bfloat16)
            run = ForwardBackward(drafter, head, config, torch.bfloat16, shapes)
            run.warm_up(TargetFeatures(batch, features_TF, None), lambda _phase: None)

    return warm_up


def whole(layers: int, hidden: int) -> Callable[[], None]:
    """The same sizes with the whole forward as one graph, layers repeated in it."""
    import torch

    from dflash.attention import attend_tiled, tiled_mask
    from dflash.compile import backward_on_this_thread
    from dflash.drafter import DraftLayer, Regions, Rope, autocast

    device = torch.device("cuda:0")
    drafter, _, _ = drafter_and_head(layers, hidden)()
    in_graph = Regions(DraftLayer.before_attention, attend_tiled, DraftLayer.after_attention)

    def forward(drafter, hidden_PD, features_TF, rope_KE, mask):
        context_TD = drafter.context(features_TF)
        for layer in drafter.layers:
            hidden_PD = layer(hidden_PD, context_TD, rope_KE, mask, in_graph)
        return drafter.norm(hidden_PD)

    def warm_up() -> None:
        for length in CONTEXTS:
            compiled = torch.compile(forward, dynamic=False, fullgraph=True)
            document_T = torch.zeros(length, dtype=torch.long, device=device)
            anchor_N = torch.arange(BLOCKS, device=device)
            position_K = torch.arange(length + BLOCKS * BLOCK_SIZE, device=device)
            with autocast(device, torch.bfloat16):
                hidden_PD = compiled(
                    drafter,
                    torch.randn(BLOCKS * BLOCK_SIZE, hidden, device=device, dtype=torch.bfloat16),
                    torch.randn(length, 2 * hidden, device=device, dtype=torch.bfloat16),
                    Rope.at(position_K, drafter.config, torch.bfloat16),
                    tiled_mask(document_T, anchor_N, BLOCK_SIZE),
                )
            with backward_on_this_thread():
                hidden_PD.float().sum().backward()

    return warm_up


def drafter_and_head(layers: int, hidden: int):
    """A function that makes a drafter with random weights on the GPU, its head and a config."""
    import torch

    from dflash.config import TrainConfig
    from dflash.drafter import DrafterConfig, build_drafter
    from dflash.target import FrozenHead

    shape = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=8192,
        block_size=BLOCK_SIZE,
        mask_token_id=0,
        target_layer_ids=(1, 2),
        num_target_layers=6,
        sliding_window=0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config = TrainConfig.from_dict(
        {"model": {"target-model": "-"}, "data": {"data-dir": "-"}, "run": {"output-dir": "-"}}
    )
    built = build_drafter(shape, seed=0, device=torch.device("cpu"))

    def make():
        drafter = copy.deepcopy(built).cuda()
        table = torch.zeros(VOCABULARY, hidden, device="cuda", dtype=torch.bfloat16)
        return drafter, FrozenHead(table, table), config

    return make


if __name__ == "__main__":
    main()
