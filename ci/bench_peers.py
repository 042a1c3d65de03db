"""One drafter training step: ours, SpecForge's, speculators', and the matrix ceiling, side by side.

    python ci/bench_peers.py --peers DIR [--device cuda:0] [--shapes 8b-1,8b-2,8b-4,27b-1]

Random weights; forward, loss, backward, gradient clipping and optimizer step. Every row is a
process of its own, measured while no other one compiles or runs. Nothing is asserted; what cannot
be run says why.

DIR holds the peers, unpacked: pip install --no-deps --target DIR specforge speculators ..., with
what they import and your Python does not have (pydantic, loguru, and liger-kernel for one row).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from children import side_by_side, step_of
from shapes import QWEN3_8B, QWEN36_27B, SMALL, TINY, Shape

CONTENDERS = (
    "ours",
    "ours-whole",
    "ours-soft",
    "specforge",
    "specforge-liger",
    "speculators",
    "speculators-adamw",
)
SHAPES = {
    **{f"8b-{n}": QWEN3_8B.with_(documents=n) for n in (1, 2, 4)},
    **{f"27b-{n}": QWEN36_27B.with_(documents=n) for n in (1, 2)},
    # For the CPU.
    "small-1": SMALL,
    "small-2": SMALL.with_(tokens=1024, vocabulary=32768),
}
HEAD = (
    f"{'':18}{'ms':>9} {'TFLOP/s':>8} {'of ceiling':>10} {'peak GB':>8} {'tokens/s':>9} "
    f"{'first s':>8} {'time':>6} {'memory':>7}   (time, memory: ours = 1)"
)


def main() -> None:
    """Measure the ceiling and every row, and print the table."""
    arguments, started_s = parsed(), time.monotonic()
    shapes = [TINY] if arguments.tiny else [SHAPES[name] for name in arguments.shapes.split(",")]
    ceiling = child(arguments, "ceiling", TINY)
    if "error" in ceiling:
        raise SystemExit(ceiling.get("stderr") or ceiling["error"])
    print(
        f"{ceiling['device']}; torch {ceiling['torch']}, transformers {ceiling['transformers']}; "
        f"ceiling, a square matrix product: {ceiling['tflops']:.4g} TFLOP/s"
    )
    notes: dict[str, str] = {}
    for shape in shapes:
        print(f"\n{title(shape)}\n{HEAD}", flush=True)
        rows: dict[str, dict[str, Any]] = {}
        names = arguments.contenders.split(",")

        def measure(name: str, shape: Shape = shape) -> dict[str, Any]:
            over = time.monotonic() - started_s > arguments.budget_s
            return {"error": "--budget-s is over"} if over else child(arguments, name, shape)

        measurements = side_by_side(measure, names, at_once=arguments.at_once)
        for name, row in zip(names, measurements, strict=True):
            rows[name] = row
            print(as_text(name, shape, row, rows.get("ours", {}), ceiling["tflops"]), flush=True)
            if "uses" in row:
                notes.setdefault(name, row["uses"] + absent(row))
            if arguments.json:
                save(arguments.json, {"shape": shape.name, "who": name, **row})
    print("\nWhat each used")
    for name, note in notes.items():
        print(f"  {name}: {note}")


def child(arguments: argparse.Namespace, name: str, shape: Shape) -> dict[str, Any]:
    """What the contender's own process found; only the peers' sees their packages."""
    peers = arguments.peers and not name.startswith("ours")
    return step_of(
        name,
        shape,
        device=arguments.device,
        steps=arguments.steps,
        timeout_s=arguments.timeout_s,
        path=(arguments.peers.resolve(),) if peers else (),
    )


def parsed() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="directory with the peers' packages")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", default="8b-1,8b-2,8b-4,27b-1", help=", ".join(SHAPES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="in this order")
    parser.add_argument("--steps", type=int, default=8, help="steps in a row, measured thrice")
    parser.add_argument(
        "--timeout-s", type=float, default=400, help="for a row to compile; and to run"
    )
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no row after so long")
    parser.add_argument("--at-once", type=int, default=1, help="rows that compile side by side")
    parser.add_argument("--tiny", action="store_true", help="one tiny shape, for a machine at hand")
    parser.add_argument("--json", type=Path, help="append every row to this file as well")
    arguments = parser.parse_args()
    for given, known in ((arguments.shapes, SHAPES), (arguments.contenders, CONTENDERS)):
        if unknown := sorted(set(given.split(",")) - set(known)):
            parser.error(f"{unknown[0]!r} must be one of {', '.join(known)}")
    return arguments


def title(shape: Shape) -> str:
    """Sizes of a table."""
    return (
        f"{shape.name}: {shape.documents} x {shape.tokens} tokens, {shape.anchors} anchors x "
        f"{shape.block} each, hidden {shape.hidden}, {shape.layers} layers, vocabulary "
        f"{shape.vocabulary}; {shape.flops / 1e12:.4g} TFLOP"
    )


def as_text(
    name: str, shape: Shape, row: dict[str, Any], base: dict[str, Any], ceiling: float
) -> str:
    """One row; the ratios are to `base`, where there is one."""
    if "error" in row:
        return f"{name:18}could not be run: {row['error']}"
    tflops = shape.flops / row["ms"] / 1e9
    ratios = [f"{row[key] / base[key]:.2f}" if base.get(key) else "-" for key in ("ms", "peak_gb")]
    return (
        f"{name:18}{row['ms']:9.1f} {tflops:8.4g} {tflops / ceiling:10.1%} {row['peak_gb']:8.2f} "
        f"{1e3 * shape.context_tokens / row['ms']:9.0f} {row['first_s']:8.1f} {ratios[0]:>6} "
        f"{ratios[1]:>7}"
    )


def absent(row: dict[str, Any]) -> str:
    """The peer's version, and what of its imports was stood in for."""
    if "version" not in row:
        return ""
    missing = f"; not installed, never called: {', '.join(row['absent'])}" if row["absent"] else ""
    return f"; version {row['version']}{missing}"


def save(path: Path, row: dict[str, Any]) -> None:
    """Append a row as a line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
