"""The `dflash` command. Nothing here imports torch until a command needs it."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from dflash import __version__
from dflash.before_torch import (
    keep_bars_out_of_logs,
    log_to_stderr,
    needing,
    prepare_to_decode,
    refuse_double_ownership,
    require_directory,
    share_cores,
)
from dflash.config import TrainConfig, config_hash
from dflash.decoding_options import DecodingOptions, EvaluateOptions, GenerateOptions
from dflash.errors import DataError
from dflash.options import ConfigCommand, DflashCommand

EXISTING = click.Path(exists=True, path_type=Path)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
# A decoding step takes a GPU's host as long for one prompt as for hundreds.
TOGETHER_ON_GPU, TOGETHER_ON_CPU = 256, 32


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dflash")
def main() -> None:
    """Train DFlash block-diffusion drafters for speculative decoding."""


@main.command(cls=ConfigCommand)
@click.option(
    "--rehearse",
    is_flag=True,
    help="train two steps elsewhere, save, reload; print memory and time that the run will need",
)
def train(config: TrainConfig, rehearse: bool) -> None:
    """Train a drafter for a frozen target model.

    Three stages run as threads: prefetching, the target's forward passes, the drafter's training.
    """
    refuse_double_ownership()
    require_directory("--target-model", config.model.target_model)
    require_directory("--data-dir", config.data.data_dir)
    if config.evaluation.eval_data is not None:
        require_directory("--eval-data", config.evaluation.eval_data)
    # A run that is resumed needs it no longer.
    if config.model.init_from is not None and config.run.resume == "never":
        require_directory("--init-from", config.model.init_from)
    if note := share_cores(config, os.environ, len(os.sched_getaffinity(0))):
        click.echo(note, err=True)
    keep_bars_out_of_logs(os.environ)
    with needing("train"):
        if rehearse:
            from dflash.rehearse import rehearse as run
        else:
            from dflash.trainer import train as run
    sys.exit(run(config))


@main.command(
    cls=DflashCommand, sections={"decoding": DecodingOptions, "evaluation": EvaluateOptions}
)
@click.argument("checkpoint", type=EXISTING)
@click.option(
    "--data",
    type=EXISTING,
    multiple=True,
    required=True,
    help="prompts: .txt (one a line), .jsonl or tokenized completions; may be repeated",
)
def evaluate(
    checkpoint: Path,
    data: tuple[Path, ...],
    decoding: DecodingOptions,
    evaluation: EvaluateOptions,
) -> None:
    """Measure CHECKPOINT, of any layout, or the newest one of a run.

    Decodes every prompt plainly and with drafts: acceptance length (tau), speed-up, and whether the
    text is the target's own, token for token. Exit code 1 where it is not.
    """
    prepare_to_decode(decoding)
    with needing("train"):
        from dflash.evaluate import evaluate as run
    sys.exit(run(checkpoint, data, decoding, evaluation))


@main.command(
    cls=DflashCommand, sections={"decoding": DecodingOptions, "generation": GenerateOptions}
)
@click.argument("checkpoint", type=EXISTING)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
def generate(
    checkpoint: Path,
    prompts: tuple[str, ...],
    decoding: DecodingOptions,
    generation: GenerateOptions,
) -> None:
    """Write the target's own greedy text for each PROMPT, sped up by the drafter in CHECKPOINT.

    Without a PROMPT, every line of standard input is one.
    """
    prepare_to_decode(decoding)
    with needing("train"):
        from dflash.generate import generate as run
    lines = (line.rstrip("\n") for line in sys.stdin)
    sys.exit(run(checkpoint, prompts or lines, decoding, generation.tree_nodes))


@main.command(cls=DflashCommand)
@click.argument("checkpoint", type=EXISTING)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "layout",
    type=click.Choice(["z-lab", "speculators"]),
    required=True,
    help="z-lab: for z-lab's code and SGLang; speculators: for vLLM  [required]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="dtype of the weights",
)
@click.option(
    "--target-model",
    metavar="PATH",
    help="directory of the target, to check against (speculators: needed, by default the "
    "checkpoint's own)",
)
@click.option(
    "--verifier",
    metavar="NAME",
    help="how the speculators layout names its target [--target-model]",
)
def export(
    checkpoint: Path,
    out: Path,
    layout: str,
    dtype: str,
    target_model: str | None,
    verifier: str | None,
) -> None:
    """Write CHECKPOINT (of any layout, or the newest one of a run) to the directory OUT."""
    with needing("train"):
        from dflash.export import export as run
    run(checkpoint, out, layout, dtype=dtype, target_model=target_model, verifier=verifier)
    click.echo(f"wrote {out} ({layout}, {dtype})")


@main.command("config", cls=ConfigCommand)
def print_config(config: TrainConfig) -> None:
    """Check the options and print them all as TOML; nothing is loaded or started."""
    click.echo(f"# config hash {config_hash(config)}")
    click.echo(config.to_toml(), nl=False)


@main.command(cls=DflashCommand)
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--target-model", required=True, type=DIRECTORY, help="directory of the target")
@click.option(
    "--output-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="where the completions go; must not exist",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=2),
    default=8192,
    show_default=True,
    help="most tokens of a prompt with its completion; longer rows of token ids are cut",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=2),
    default=2048,
    show_default=True,
    help="most tokens of a completion",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="prompts that are answered together, fewer where the GPU's memory does not hold them"
    f"  [default: {TOGETHER_ON_GPU} on a GPU, {TOGETHER_ON_CPU} on the CPU]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="0 is greedy, which replaying a completion relies on",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="smallest probability mass to draw from, with a temperature",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--chat-template/--no-chat-template",
    default=True,
    show_default=True,
    help="put prompts into the tokenizer's chat template, or continue them as they stand",
)
@click.option("--device", default="cuda:0", show_default=True, help="cuda:N or cpu")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
)
@click.option("--trust-remote-code", is_flag=True, help="run Python code of the target's directory")
def prepare(**options: Any) -> None:
    """Let the target answer the prompts in SOURCE, or import token rows, as data to train on.

    SOURCE is a text file (a prompt a line), a JSONL file (prompt, messages or conversations; or
    input_ids and loss_mask), a Parquet file, or a directory that datasets.save_to_disk wrote.
    Killed or stopped, the same command goes on where it was.
    """
    keep_bars_out_of_logs(os.environ)
    log_to_stderr()
    with needing("train"):
        from dflash.prepare import PrepareOptions
        from dflash.prepare import prepare as run
    if options["batch_size"] is None:
        on_cpu = options["device"] == "cpu"
        options["batch_size"] = TOGETHER_ON_CPU if on_cpu else TOGETHER_ON_GPU
    sys.exit(run(PrepareOptions(**options)))


@main.command(cls=DflashCommand)
@click.argument("a", type=DIRECTORY)
@click.argument("b", type=DIRECTORY)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="relative difference of losses and the like that counts as none",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def compare(a: Path, b: Path, tolerance: float, as_json: bool) -> None:
    """Hold two runs' output directories, A and B, against each other.

    Options, environment, batches, losses, acceptance, speed; names the first step that differs.
    Exits 0 if options and common steps agree, 1 if not, 2 if it cannot be told.
    """
    from dflash.compare import compare as run

    try:
        found = run(a, b, tolerance)
    except DataError as error:
        raise click.UsageError(f"{error}\n{error.remedy}") from error
    click.echo(found.to_json() if as_json else "\n".join(found.lines()))
    sys.exit(not found.same)


@main.command(cls=DflashCommand)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".demo"),
    show_default=True,
    help="where the model, data and checkpoints go; finished steps in it are not repeated",
)
def demo(work_dir: Path) -> None:
    """Train a drafter for a small real model on the CPU, and measure it before and after."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    keep_bars_out_of_logs(os.environ)
    with needing("demo"):
        from dflash.demo import main as run
    sys.exit(run(work_dir))
