"""How long drafter threads compile before they are ready, cold and warm; asserts nothing.

    python ci/bench_start.py --drafters 1,3 --layers 5 --hidden 4096

Each row is a process of its own with a compile cache of its own: first empty (cold), then filled by
the row before (warm). Regional: a layer is compiled once and that is used by all layers, as
`dflash train` does. Whole: the drafter's forward is one graph. CPU seconds are those of all threads
and compile workers: on a machine with few cores, or with many drafters, they decide. Needs a CUDA
device.
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
from functools import partial
from pathlib import Path

from shapes import Shape

ROOT = Path(__file__).parents[1]
CONTEXT = 1024
LIMIT_S = 400
SHAPE = Shape(
    name="start",
    documents=1,
    tokens=900,
    anchors=256,
    block=16,
    hidden=1024,
    intermediate=3072,
    layers=5,
    heads=16,
    kv_heads=8,
    head_dim=64,
    captured=2,
    vocabulary=32000,
)


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", default="1,3", help="numbers of threads")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024, help="4096: as for Qwen3-8B")
    parser.add_argument("--child", nargs=2, metavar=("THREADS", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        threads, kind = arguments.child
        print(json.dumps(measure(int(threads), kind, sized(arguments))))
        return
    counts = [int(count) for count in arguments.drafters.split(",")]
    print(f"{'':14}{'cold s':>8}{'CPU s':>8}{'warm s':>8}{'CPU s':>8}  compiled cold, warm")
    seconds = {}
    for kind, threads in [("regional", count) for count in counts] + [("whole", 1)]:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (child(threads, kind, arguments, cache) for _ in range(2))
        seconds[kind, threads] = cold["seconds"]
        columns = "".join(f"{row[key]:8.1f}" for row in (cold, warm) for key in ("seconds", "cpu"))
        print(
            f"{kind + ', ' + str(threads):14}{columns}  {cold['misses']}, {warm['misses']}",
            flush=True,
        )
    first = seconds["regional", counts[0]]
    for count in counts[1:]:
        print(f"{count} drafters / {counts[0]}, cold: {seconds['regional', count] / first:.2f}")
    print(f"regional / whole, cold: {first / seconds['whole', 1]:.2f}")


def sized(size: argparse.Namespace) -> Shape:
    """The drafter of --layers and --hidden."""
    hidden, heads = size.hidden, size.hidden // SHAPE.head_dim
    kv_heads = min(SHAPE.kv_heads, heads // 2)
    sizes = {"hidden": hidden, "intermediate": 3 * hidden, "heads": heads, "kv_heads": kv_heads}
    return SHAPE.with_(layers=size.layers, **sizes)


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
        timeout=LIMIT_S,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(threads: int, kind: str, shape: Shape) -> dict[str, float]:
    """Seconds until all threads are ready, and how many graphs Inductor really compiled."""
    import psutil
    import torch
    from torch._dynamo.utils import counters

    from dflash.compile import install_thread_isolation

    def cpu_s() -> float:
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        return sum(sum(process.cpu_times()[:4]) for process in processes)  # with ended children's

    torch.ones(1, device="cuda").sum().item()  # the device's start is not what is measured
    install_thread_isolation()
    warm_up = whole(shape) if kind == "whole" else regional(shape, threads)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            warm_up()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    started_s, cpu_before_s = time.monotonic(), cpu_s()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    torch.cuda.synchronize()
    return {
        "seconds": time.monotonic() - started_s,
        "cpu": cpu_s() - cpu_before_s,
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


def regional(shape: Shape, threads: int) -> Callable[[], None]:
    """What each drafter thread of `dflash train` does before it arrives at the gate."""
    import torch
    from ours import DrafterStep, batch, drafter_config, random_head, train_config

    from dflash.batches import TargetFeatures
    from dflash.drafter import Drafter
    from dflash.shapes import ShapePolicy, Size

    device = torch.device("cuda:0")
    shapes = ShapePolicy((Size(CONTEXT, shape.anchors),), shape.block)
    sample, barrier = batch(shape, 0), threading.Barrier(threads)

    def warm_up() -> None:
        with device:
            drafter, head = Drafter(drafter_config(shape)), random_head(shape, device)
            features = (shape.tokens, shape.captured * shape.hidden)
            features_TF = torch.randn(features, dtype=torch.bfloat16)
        step = DrafterStep(drafter, head, train_config(), torch.bfloat16, shapes)
        compiled = partial(barrier.wait, timeout=LIMIT_S)
        step.warm_up(TargetFeatures(sample, features_TF, None), compiled)

    return warm_up


def whole(shape: Shape) -> Callable[[], None]:
    """The same sizes with the whole forward as one graph, layers repeated in it; one thread."""
    import torch
    from ours import drafter_config

    from dflash.attention import tiled_mask
    from dflash.compile import backward_on_this_thread
    from dflash.drafter import Drafter, autocast
    from dflash.layers import Rope, tiled_layer

    device = torch.device("cuda:0")

    def forward(drafter, hidden_PD, features_TF, rope_KE, mask):
        context_TD = drafter.context(features_TF)
        for layer in drafter.layers:
            hidden_PD = tiled_layer(layer, hidden_PD, context_TD, rope_KE, mask)
        return drafter.norm(hidden_PD)

    def warm_up() -> None:
        compiled = torch.compile(forward, dynamic=False, fullgraph=True)
        with device:
            drafter = Drafter(drafter_config(shape))
            hidden_PD = torch.randn(shape.slots, shape.hidden, dtype=torch.bfloat16)
            features = (CONTEXT, shape.captured * shape.hidden)
            features_TF = torch.randn(features, dtype=torch.bfloat16)
            position_K = torch.arange(CONTEXT + shape.slots)
            document_T, anchor_N = (
                torch.zeros_like(position_K[:CONTEXT]),
                position_K[: shape.anchors],
            )
        with autocast(device, torch.bfloat16):
            rope_KE = Rope.at(position_K, drafter.config, torch.bfloat16)
            mask = tiled_mask(document_T, anchor_N, shape.block)
            out_PD = compiled(drafter, hidden_PD, features_TF, rope_KE, mask)
        with backward_on_this_thread():
            out_PD.float().sum().backward()

    return warm_up


if __name__ == "__main__":
    main()
