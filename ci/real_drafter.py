"""A drafter for a real target within a time budget: completions, training, measurement, curves.

    python ci/prompt_files.py PROMPTS --wheels DIR
    python ci/real_drafter.py --target TARGET --prompts PROMPTS --work WORK --budget-s 540

PROMPTS holds train.jsonl, heldout.jsonl (replayed during training) and further sets to measure on.
The target answers them greedily once: what lies in WORK is used again. Then each variant of the
objective is trained for the same time, and measured by replay on all of every set; the first one
also by real decoding on some. The commands are those that a user would type.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from children import ROOT

NOISE = {"--noise-start": "0.05", "--noise-end": "0.01"}
SOFT, CAP = {"--use-soft-labels": None}, {"--cap-lambda": "0.1"}
VARIANTS: dict[str, dict[str, str | None]] = {
    "base": {},
    "soft": SOFT,
    "cap": CAP,
    "gamma-2": {"--gamma": "2"},
    "gamma-8": {"--gamma": "8"},
    "noise": NOISE,
    "all": SOFT | CAP | NOISE,
}
EVALUATIONS = 12
NEVER = 10**6
"""Steps that no run here has: at its end it evaluates and saves all the same."""
MEASURING = 0.3
"""Of what is left of the budget after the completions: for measuring, not for training."""


@dataclass(frozen=True)
class Trained:
    """A variant's run, and what it cost."""

    name: str
    directory: Path
    epochs: int
    steps: int
    seconds: float
    heldout_tau: float


def main() -> None:
    """Write the completions, train and measure every variant, draw the curves."""
    started_s = time.monotonic()
    options = parsed()
    options.work.mkdir(parents=True, exist_ok=True)
    for prompts in sorted(options.prompts.glob("*.jsonl")):
        write_completions(options, prompts)
    left_s = options.budget_s - (time.monotonic() - started_s)
    print(f"completions are there after {time.monotonic() - started_s:.0f} s", flush=True)
    variants = options.variants.split(",")
    share_s = (1 - MEASURING) * left_s / len(variants)
    if share_s <= 0:
        sys.exit(f"--budget-s {options.budget_s:g} went into completions; type the same again")
    trained = [train_within(options, name, share_s) for name in variants]
    sets = sorted(
        options.work / p.stem
        for p in options.prompts.glob("*.jsonl")
        if p.stem not in ("train", "heldout")
    )
    print(f"\n{'':10}{'epochs':>7}{'steps':>7}{'s':>6}{'heldout':>9}" + columns(sets))
    for one in trained:
        taus = "".join(f"{found['drafts'][0]['tau']:11.3f}" for found in replayed(one, sets))
        print(
            f"{one.name:10}{one.epochs:7}{one.steps:7}{one.seconds:6.0f}{one.heldout_tau:9.3f}"
            f"{taus}",
            flush=True,
        )
    print("(tau by replay; equal training time)")
    decoded(options, trained[0], sets)
    picture(options.work / "curves.svg", trained)
    print(f"done in {time.monotonic() - started_s:.0f} s of {options.budget_s:g}")


def parsed() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=absolute, required=True, help="directory of the target")
    parser.add_argument("--prompts", type=absolute, required=True, help="directory of .jsonl files")
    parser.add_argument("--work", type=absolute, required=True, help="where everything goes")
    parser.add_argument("--budget-s", type=float, required=True, help="seconds for everything")
    parser.add_argument("--variants", default="base", help=", ".join(VARIANTS))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mask-token-id", help="where the tokenizer has no mask token")
    parser.add_argument("--layers", default="5")
    parser.add_argument("--block-size", default="8")
    parser.add_argument("--max-new-tokens", default="256", help="of a completion")
    parser.add_argument("--max-seq-len", default="768")
    parser.add_argument("--batch-size", default="256", help="prompts answered together")
    parser.add_argument("--token-budget", default="16384", help="tokens of a micro-batch")
    parser.add_argument("--max-anchors", default="64", help="of a completion")
    parser.add_argument("--lr", default="1e-3")
    parser.add_argument("--decoded", default="8", help="prompts of each set decoded for real")
    options = parser.parse_args()
    if unknown := sorted(set(options.variants.split(",")) - set(VARIANTS)):
        parser.error(f"--variants {unknown[0]}: must be of {', '.join(VARIANTS)}")
    for needed in ("train.jsonl", "heldout.jsonl"):
        if not (options.prompts / needed).is_file():
            parser.error(f"--prompts {options.prompts}: no {needed}; type: ci/prompt_files.py DIR")
    return options


def absolute(path: str) -> Path:
    """The commands run in the repository, wherever this script was called."""
    return Path(path).resolve()


def write_completions(options: argparse.Namespace, prompts: Path) -> None:
    """The target's own greedy answers to a file of prompts."""
    output = options.work / prompts.stem
    if not output.exists():
        arguments = {
            "--target-model": options.target,
            "--output-dir": output,
            "--max-new-tokens": options.max_new_tokens,
            "--max-seq-len": options.max_seq_len,
            "--batch-size": options.batch_size,
            "--device": options.device,
        }
        dflash("prepare", str(prompts), arguments)


def train_within(options: argparse.Namespace, name: str, budget_s: float) -> Trained:
    """As many epochs as fit: one is tried first, to see what the start and an epoch take.

    The schedule of the learning rate so runs to its end. One epoch is trained in any case.
    """
    started_s = time.monotonic()
    trial = train(options, name, options.work / "trials" / name, epochs=1, eval_every=NEVER)
    taken_s, epoch_s = time.monotonic() - started_s, len(trial) * step_s(trial)
    evaluation_s = trial[-1]["evaluation"]["seconds"]
    start_s = taken_s - epoch_s - evaluation_s
    left_s = budget_s - taken_s - start_s - (EVALUATIONS + 1) * evaluation_s
    epochs = max(1, int(left_s / epoch_s))
    every = max(1, epochs * len(trial) // EVALUATIONS)
    output = options.work / "runs" / name
    rows = train(options, name, output, epochs, eval_every=every)
    tau = rows[-1]["evaluation"]["tau"]
    print(f"{name}: {epochs} epochs in {time.monotonic() - started_s:.0f} s", flush=True)
    return Trained(name, output, epochs, len(rows), rows[-1]["elapsed_s"], tau)


def step_s(rows: list[dict[str, Any]]) -> float:
    """Median seconds from step to step in a run's second half, when all is warm.

    Without the last one, which the evaluation is part of; of a run that short, its last step's.
    """
    elapsed_s = [row["elapsed_s"] for row in rows[len(rows) // 2 : -1]]
    steps = [after - before for before, after in pairwise(elapsed_s)]
    return median(steps) if steps else rows[-1]["seconds"]


def train(
    options: argparse.Namespace, name: str, output: Path, epochs: int, eval_every: int
) -> list[dict[str, Any]]:
    """Metrics of a run's steps."""
    arguments = {
        "--target-model": options.target,
        "--data-dir": options.work / "train",
        "--output-dir": output,
        "--target-gpus": options.device,
        "--drafter-gpus": options.device,
        "--num-draft-layers": options.layers,
        "--block-size": options.block_size,
        "--gamma": "4",
        "--max-seq-len": options.max_seq_len,
        "--token-budget": options.token_budget,
        "--max-anchors": options.max_anchors,
        "--lr": options.lr,
        "--epochs": epochs,
        "--eval-every": eval_every,
        "--eval-data": options.work / "heldout",
        "--save-interval": NEVER,
        "--log-format": "lines",
    }
    if options.mask_token_id:
        arguments["--mask-token-id"] = options.mask_token_id
    dflash("train", arguments | VARIANTS[name])
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def columns(sets: list[Path]) -> str:
    """Headings of the sets' tau."""
    return "".join(f"{path.name:>11}" for path in sets)


def replayed(one: Trained, sets: list[Path]) -> list[dict[str, Any]]:
    """What `dflash evaluate --replay` found on each set."""
    if not sets:
        return []
    data = [word for path in sets for word in ("--data", str(path))]
    return evaluated(one, *data, "--replay")


def decoded(options: argparse.Namespace, one: Trained, sets: list[Path]) -> None:
    """Decode some prompts of each set for real, and print speed, losslessness and parity."""
    for path in sets:
        limits = ("--limit", options.decoded, "--max-new-tokens", options.max_new_tokens)
        (found,) = evaluated(one, "--data", str(path), *limits, "--parity")
        draft = found["drafts"][0]
        gap = max((abs(slot["training"] - slot["decoding"]) for slot in found["parity"]), default=0)
        print(
            f"{one.name}, {path.name}, {found['prompts']} prompts decoded: tau {draft['tau']:.3f}, "
            f"{draft['speed_up']:.2f}x plain decoding; {draft['equal']} texts equal, "
            f"{len(draft['ties'])} ties, {len(draft['wrong'])} wrong; training mask and decoding "
            f"at most {gap:.1%} apart",
            flush=True,
        )


def evaluated(one: Trained, *arguments: str) -> list[dict[str, Any]]:
    """The sets of `dflash evaluate --json`; it ends with 1 where a text is wrong."""
    command = [sys.executable, "-m", "dflash", "evaluate", str(one.directory), *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(done.returncode or 1)
    return json.loads(done.stdout)["sets"]


def picture(path: Path, trained: list[Trained]) -> None:
    """Draw the curves, if this Python can."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; ci/curves.py draws it out of the runs")
        return
    runs = [str(one.directory) for one in trained]
    command = [sys.executable, str(Path(__file__).with_name("curves.py")), *runs]
    subprocess.run([*command, "--output", str(path)], check=True)
    print(f"curves: {path}")


def dflash(command: str, *arguments: Any) -> None:
    """Run the command, or end with its status; mappings are options, None is a flag's value."""
    words = [sys.executable, "-m", "dflash", command]
    for one in arguments:
        pairs = one.items() if isinstance(one, dict) else [(one, None)]
        words += [str(word) for pair in pairs for word in pair if word is not None]
    if code := subprocess.run(words, cwd=ROOT).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
