"""A drafter for a real target: completions, training, measurement, curves.

    python ci/prompt_files.py PROMPTS --wheels DIR
    python ci/real_drafter.py --target TARGET --prompts PROMPTS --work WORK --train-s 300

PROMPTS holds train.jsonl, heldout.jsonl (replayed during training) and further sets to measure on.
The target answers them greedily. Then each variant of the objective is trained for the same time,
or for the same --epochs (where several share a GPU, so that times say nothing), and measured by
replay on all of every set; the first one also by real decoding on some. The commands are those that
a user would type. What is in WORK already is used: after Ctrl-C, or with more variants, type the
same again, and training goes on where it was.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from children import ROOT

NOISE = {"--noise-start": "0.05", "--noise-end": "0.01"}
SOFT, CAP = {"--use-soft-labels": None}, {"--cap-lambda": "0.1"}
GAMMA_2 = {"--gamma": "2"}
VARIANTS: dict[str, dict[str, str | None]] = {
    "base": {},
    "soft": SOFT,
    "cap": CAP,
    "gamma-2": GAMMA_2,
    "gamma-8": {"--gamma": "8"},
    "noise": NOISE,
    "together": SOFT | CAP | GAMMA_2,
}
NEVER = 10**6
"""Steps that no run here has: at its end it saves all the same."""
SAVES_S = 120.0
"""For a run that was interrupted to save its state."""


@dataclass(frozen=True)
class Result:
    """A variant's run: what it cost, and tau by replay of the held-out set and of every other."""

    name: str
    epochs: int
    steps: int
    step_ms: float
    heldout_tau: float
    tau: list[float]

    def __str__(self) -> str:
        taus = "".join(f"{tau:11.3f}" for tau in self.tau)
        return (
            f"{self.name:10}{self.epochs:7}{self.steps:7}{self.step_ms:9.1f}"
            f"{self.heldout_tau:9.3f}{taus}"
        )


def main() -> None:
    """Write the completions, train and measure every variant, draw the curves."""
    options = parsed()
    options.work.mkdir(parents=True, exist_ok=True)
    for prompts in sorted(options.prompts.glob("*.jsonl")):
        write_completions(options, prompts)
    sets = sorted(
        options.work / p.stem
        for p in options.prompts.glob("*.jsonl")
        if p.stem not in ("train", "heldout")
    )
    variants = options.variants.split(",")
    results = [result(options, name, sets) for name in variants]
    headings = "".join(f"{path.name:>11}" for path in sets)
    print(f"\n{'':10}{'epochs':>7}{'steps':>7}{'ms/step':>9}{'heldout':>9}{headings}")
    print(*results, sep="\n")
    cost = f"about {options.train_s:g} s" if options.train_s else f"{options.epochs} epochs"
    print(f"(tau by replay; each trained for {cost})", flush=True)
    decoded(options, variants[0], sets)
    picture(options.work / "curves.svg", [run_of(options, name) for name in variants])


def parsed() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=absolute, required=True, help="directory of the target")
    parser.add_argument("--prompts", type=absolute, required=True, help="directory of .jsonl files")
    parser.add_argument("--work", type=absolute, required=True, help="where everything goes")
    cost = parser.add_mutually_exclusive_group(required=True)
    cost.add_argument("--train-s", type=float, help="seconds of training for each variant")
    cost.add_argument("--epochs", type=int, help="of each variant")
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
    parser.add_argument("--eval-every", default="200", help="steps between replays of heldout")
    parser.add_argument("--decoded", default="8", help="prompts of each set decoded for real, or 0")
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


def run_of(options: argparse.Namespace, name: str) -> Path:
    """Where a variant is trained."""
    return options.work / "runs" / name


def result(options: argparse.Namespace, name: str, sets: list[Path]) -> Result:
    """Train and measure a variant, or read what was found when that was done."""
    path = options.work / f"{name}.json"
    if not path.exists():
        found = measured(options, name, sets)
        path.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return Result(**json.loads(path.read_text(encoding="utf-8")))


def measured(options: argparse.Namespace, name: str, sets: list[Path]) -> Result:
    """Train a variant, evaluated meanwhile, and replay every set."""
    epochs = options.epochs or epochs_within(options, name)
    evaluated = {
        "--epochs": epochs,
        "--eval-every": options.eval_every,
        "--eval-data": options.work / "heldout",
    }
    rows = train(options, name, run_of(options, name), evaluated)
    tau = [found["drafts"][0]["tau"] for found in replayed(run_of(options, name), sets)]
    heldout_tau = rows[-1]["evaluation"]["tau"]
    return Result(name, epochs, len(rows), 1e3 * step_s(rows), heldout_tau, tau)


def epochs_within(options: argparse.Namespace, name: str) -> int:
    """How many epochs fit into --train-s, one at least: one is tried, to see what a step takes.

    The schedule of the learning rate so runs to its end. Compiling, and the evaluations meanwhile,
    are not counted.
    """
    trial = train(options, name, options.work / "trials" / name, {"--epochs": 1})
    return max(1, int(options.train_s / (len(trial) * step_s(trial))))


def step_s(rows: list[dict[str, Any]]) -> float:
    """Mean seconds of a step in a run's second half, when all is warm, without evaluations."""
    return fmean(row["seconds"] for row in rows[len(rows) // 2 :])


def train(
    options: argparse.Namespace, name: str, output: Path, more: dict[str, Any]
) -> list[dict[str, Any]]:
    """Metrics of a run's steps; one that was begun goes on, and one that has ended is left."""
    from dflash.compare import read_metrics

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
        "--save-interval": NEVER,
        "--resume": "auto",
        "--log-format": "lines",
    }
    if options.mask_token_id:
        arguments["--mask-token-id"] = options.mask_token_id
    dflash("train", arguments | more | VARIANTS[name])
    return list(read_metrics(output).values())


def replayed(run: Path, sets: list[Path]) -> list[dict[str, Any]]:
    """What `dflash evaluate --replay` found on each set."""
    if not sets:
        return []
    data = [word for path in sets for word in ("--data", str(path))]
    return evaluated(run, *data, "--replay")


def decoded(options: argparse.Namespace, name: str, sets: list[Path]) -> None:
    """Decode some prompts of each set for real, and print speed, losslessness and parity."""
    for path in sets if int(options.decoded) else []:
        limits = ("--limit", options.decoded, "--max-new-tokens", options.max_new_tokens)
        (found,) = evaluated(run_of(options, name), "--data", str(path), *limits, "--parity")
        draft = found["drafts"][0]
        gap = max((abs(slot["training"] - slot["decoding"]) for slot in found["parity"]), default=0)
        print(
            f"{name}, {path.name}, {found['prompts']} prompts decoded: tau {draft['tau']:.3f}, "
            f"{draft['speed_up']:.2f}x plain decoding; {draft['equal']} texts equal, "
            f"{len(draft['ties'])} ties, {len(draft['wrong'])} wrong; training mask and decoding "
            f"at most {gap:.1%} apart",
            flush=True,
        )


def evaluated(run: Path, *arguments: str) -> list[dict[str, Any]]:
    """The sets of `dflash evaluate --json`; it ends with 1 where a text is wrong."""
    command = [sys.executable, "-m", "dflash", "evaluate", str(run), *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(done.returncode or 1)
    return json.loads(done.stdout)["sets"]


def picture(path: Path, runs: list[Path]) -> None:
    """Draw the curves, if this Python can."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; ci/curves.py draws it out of the runs")
        return
    command = [sys.executable, str(Path(__file__).with_name("curves.py")), *map(str, runs)]
    subprocess.run([*command, "--output", str(path)], check=True)
    print(f"curves: {path}")


def dflash(command: str, *arguments: Any) -> None:
    """Run the command, or end with its status; mappings are options, None is a flag's value.

    Ctrl-C reaches the command as well: it is waited for while it saves its state.
    """
    words = [sys.executable, "-m", "dflash", command]
    for one in arguments:
        pairs = one.items() if isinstance(one, dict) else [(one, None)]
        words += [str(word) for pair in pairs for word in pair if word is not None]
    with subprocess.Popen(words, cwd=ROOT) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait(SAVES_S)
            raise
    if code:
        sys.exit(code)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; type the same again to go on")
