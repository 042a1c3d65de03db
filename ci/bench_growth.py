"""What a training step costs as its anchors, block size and documents grow, and a formula for it.

    python ci/bench_growth.py [--device cuda:0] [--tiny]

Qwen3-8B's drafter. The formula is the least-squares fit of seconds
to a constant, context tokens, draft slots, and pairs of a slot and a context token that it may
attend to; the residual says how far to trust it. Nothing is asserted.
"""

import argparse
from typing import Any

import numpy as np
from children import side_by_side, step_of
from shapes import QWEN3_8B, TINY, Shape

# Not one size at a time alone: slots and tokens must grow together too, or the fit cannot tell
# their product from their sum. Blocks of 8 and 256 anchors make as many slots.
GROWN = (
    {},
    {"anchors": 128},
    {"anchors": 256},
    {"block": 8},
    {"block": 32},
    {"tokens": 1024},
    {"tokens": 6144},
    {"tokens": 6144, "anchors": 128},
    {"tokens": 6144, "block": 32},
)
GROWN_TINY = ({}, {"block": 8}, {"tokens": 192}, {"tokens": 192, "block": 8}, {"anchors": 16})
TERMS = ("s", "us per context token", "us per draft slot", "ns per slot and context token")
UNITS = np.array([1.0, 1e6, 1e6, 1e9])


def main() -> None:
    """Measure the grid and print it with the fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=8, help="steps in a row, measured thrice")
    parser.add_argument("--at-once", type=int, default=1, help="rows that compile side by side")
    parser.add_argument(
        "--timeout-s", type=float, default=400, help="for a row to compile; and to run"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a machine at hand")
    arguments = parser.parse_args()
    base, grown = (TINY, GROWN_TINY) if arguments.tiny else (QWEN3_8B, GROWN)
    shapes = [base.with_(**changes) for changes in grown]
    print(f"{'tokens':>7}{'anchors':>9}{'block':>7}{'slots':>8}{'ms':>9}{'tokens/s':>10}")

    def measure(shape: Shape) -> dict[str, Any]:
        limits = {"steps": arguments.steps, "timeout_s": arguments.timeout_s}
        return step_of("ours", shape, device=arguments.device, **limits)

    rows = side_by_side(measure, shapes, at_once=arguments.at_once)
    seconds = []
    for shape, row in zip(shapes, rows, strict=True):
        if "error" in row:
            raise SystemExit(f"{shape}: {row['error']}")
        seconds.append(row["ms"] / 1e3)
        print(
            f"{shape.tokens:7}{shape.anchors:9}{shape.block:7}{shape.slots:8}"
            f"{1e3 * seconds[-1]:9.2f}{shape.context_tokens / seconds[-1]:10.0f}",
            flush=True,
        )
    coefficients, residuals = fitted(shapes, np.array(seconds))
    terms = zip(coefficients * UNITS, TERMS, strict=True)
    print("fit: " + " + ".join(f"{value:.4g} {unit}" for value, unit in terms))
    print(
        f"residual: {np.sqrt((residuals**2).mean()):.1%} of a step's time (root mean square), at "
        f"most {np.abs(residuals).max():.1%}"
    )


def fitted(shapes: list[Shape], seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per unit of each term, and what is left over, relative to what was measured.

    Rows are weighted so that each counts by its relative error. Half of a document's tokens are
    before an anchor on average.
    """
    terms = np.array(
        [
            [1, shape.context_tokens, shape.slots, shape.slots * shape.tokens / 2]
            for shape in shapes
        ],
        dtype=float,
    )
    relative = terms / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    solution, *_ = np.linalg.lstsq(relative / scale, np.ones(len(shapes)), rcond=None)
    coefficients = solution / scale
    return coefficients, terms @ coefficients / seconds - 1


if __name__ == "__main__":
    main()
