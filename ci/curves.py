"""Draws the cross entropy and the acceptance length of runs, out of their metrics.

    python ci/curves.py RUN [RUN ...] --output curves.svg

A run is an output directory of `dflash train`, and is called as that is. Needs matplotlib.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

SMOOTHED = 0.05  # of a curve's points, on each side


@dataclass(frozen=True)
class Curves:
    """Cross entropy, smoothed, and tau of held-out completions where it was measured."""

    name: str
    steps: list[int]
    ce: list[float]
    evaluated: list[int]
    tau: list[float]


def main() -> None:
    """Read the runs and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--output", type=Path, required=True, help=".svg or .png")
    arguments = parser.parse_args()
    draw([read(run) for run in arguments.runs], arguments.output)


def read(run: Path) -> Curves:
    """The curves of a run's directory."""
    from dflash.compare import read_metrics

    rows = list(read_metrics(run).values())
    measured = [row for row in rows if row["evaluation"]]
    reach = int(SMOOTHED * len(rows))
    return Curves(
        run.name,
        [row["step"] for row in rows[reach : len(rows) - reach]],
        smoothed([row["ce"] for row in rows], reach),
        [row["step"] for row in measured],
        [row["evaluation"]["tau"] for row in measured],
    )


def smoothed(values: list[float], reach: int) -> list[float]:
    """The mean of each value that has so many neighbours on either side, with these."""
    windows = (values[i - reach : i + reach + 1] for i in range(reach, len(values) - reach))
    return [fmean(window) for window in windows]


def draw(curves: list[Curves], output: Path) -> None:
    """Both panels, a colour for each run, named at the end of its curve of tau."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.rcParams.update(
        {"svg.hashsalt": "curves", "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for one in curves:
        (line,) = left.plot(one.steps, one.ce, linewidth=1.2, label=one.name)
        right.plot(one.evaluated, one.tau, marker="o", markersize=3, color=line.get_color())
    left.set(xlabel="optimizer step", ylabel="cross entropy, weighted as trained", yscale="log")
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    right.set(xlabel="optimizer step", ylabel="acceptance length, held out")
    right.set_ylim(bottom=1)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    if len(curves) > 1:
        left.legend(frameon=False)
    # Without a date: the same metrics give the same file.
    metadata = {"Date": None} if output.suffix == ".svg" else None
    figure.savefig(output, metadata=metadata, dpi=150)


if __name__ == "__main__":
    main()
