"""The pipeline against its stages by turns, and on one GPU against two; asserts nothing.

    python ci/bench_gpus.py --steps 12

Makes a target with random weights and random completions in a scratch directory, then runs
`dflash train` in each layout and prints tokens/s, the share of time that each stage waits, and the
ratio to the first row: the same target and drafter one after the other in one thread. Beside it
the ratios that the busiest GPU would allow if no stage ever waited: by the target's and drafter's
parts of the first row's time, and by their parts of the operations, which need no measurement.
Layouts for more GPUs than there are, are left out.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from runs import STAGES, Devices, Sizes, by_turns, make_data, make_target, train

LAYOUTS = [Devices("0", "0"), Devices("0", "1"), Devices("0", "0,1"), Devices("0,1", "0,1")]
LAYOUTS_CPU = [Devices("cpu", "cpu")]
TINY = Sizes(hidden=64, layers=8, head_dim=16, vocabulary=256, length=64, rows=2, anchors=4)


def main() -> None:
    """Measure the link and every layout, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size of the target")
    parser.add_argument("--target-layers", type=int, default=24)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a machine at hand")
    arguments = parser.parse_args()
    usual = Sizes(
        hidden=arguments.hidden,
        layers=arguments.target_layers,
        head_dim=128,
        vocabulary=65536,
        length=1536,
        rows=10,
        anchors=128,
    )
    sizes, layouts = TINY if arguments.tiny else usual, possible(arguments.device)
    with tempfile.TemporaryDirectory() as scratch:
        target, data = Path(scratch, "target"), Path(scratch, "data")
        make_target(target, sizes, arguments.device)
        make_data(data, sizes, micro_batches=2 * arguments.steps)
        outputs = [Path(scratch, f"run-{i}") for i in range(len(layouts))]
        found = [train(target, data, outputs[0], sizes, layouts[0])]
        turns = by_turns(outputs[0], Path(scratch, "turns"))
        print(
            f"{'target':>8}{'drafters':>10}{'tokens/s':>10}{'ratio':>7}{'by time, operations':>21}"
            "   stall of each stage"
        )
        print(
            f"{'by turns':>18}{turns['tokens_per_s']:10.0f}{1:7.2f}{'':21}   the target takes "
            f"{turns['target']:.0%} of the time, and {turns['target_flops']:.0%} of the operations"
        )
        for devices, output in zip(layouts, outputs, strict=True):
            if output != outputs[0]:
                found.append(train(target, data, output, sizes, devices))
            row = found[-1]
            waits = "  ".join(f"{stage} {row[stage]:.0%}" for stage in STAGES)
            allowed = [devices.most(turns[part]) for part in ("target", "target_flops")]
            print(
                f"{devices.targets:>8}{devices.drafters:>10}{row['tokens_per_s']:10.0f}"
                f"{row['tokens_per_s'] / turns['tokens_per_s']:7.2f}"
                f"{allowed[0]:15.2f}{allowed[1]:6.2f}   {waits}",
                flush=True,
            )


def possible(device: str) -> list[Devices]:
    """The layouts for this machine; with two GPUs, says how fast they copy."""
    if device == "cpu":
        return LAYOUTS_CPU
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        print(f"copy of 1 GiB from GPU 0 to GPU 1: {link_gb_per_s():.0f} GB/s", flush=True)
    return [
        one for one in LAYOUTS if max(map(int, f"{one.targets},{one.drafters}".split(","))) < gpus
    ]


def link_gb_per_s() -> float:
    """Median of ten copies of 1 GiB."""
    import torch
    from clock import GB, seconds

    source = torch.randn(2**28, device="cuda:0")
    there = torch.empty_like(source, device="cuda:1")
    torch.cuda.synchronize(0)
    times = [seconds(lambda: there.copy_(source), there.device) for _ in range(12)]
    return source.nbytes / statistics.median(times[2:]) / GB


if __name__ == "__main__":
    main()
