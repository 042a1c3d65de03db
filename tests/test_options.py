"""The command line: the frozen surface, a real command line, precedence, and usage errors."""

import dataclasses
import shlex

import pytest
from click.testing import CliRunner

from dflash.cli import main
from dflash.config import SECTIONS, TrainConfig
from dflash.errors import Exit
from dflash.fields import flag_of, key_of

REQUIRED = "--target-model target --data-dir data --output-dir out"

# The surface: growing it edits this table. MISSING is a required option.
MISSING = dataclasses.MISSING
SURFACE = {
    "model": {
        "--target-model": MISSING,
        "--init-from": None,
        "--num-draft-layers": 5,
        "--block-size": 16,
        "--target-layer-ids": None,
        "--mask-token-id": None,
        "--sliding-window": 0,
        "--dtype": "auto",
        "--trust-remote-code": False,
    },
    "data": {
        "--data-dir": MISSING,
        "--token-budget": 49152,
        "--max-seq-len": 8192,
        "--max-batch-size": 64,
        "--num-prefetch-threads": 4,
        "--seed": 0,
    },
    "devices": {
        "--target-gpus": ("cuda:0",),
        "--drafter-gpus": ("cuda:0",),
        "--compile": "auto",
        "--draft-chunk": 16384,
        "--cuda-graphs": "auto",
        "--late-compile": "refuse",
    },
    "objective": {
        "--gamma": 7.0,
        "--max-anchors": 512,
        "--max-draft-positions": 65536,
        "--noise-start": 0.0,
        "--noise-end": 0.0,
        "--noise-type": "uniform",
        "--use-soft-labels": False,
        "--kl-weight": 0.15,
        "--kl-temperature": 2.0,
        "--cap-lambda": 0.0,
    },
    "optimizer": {
        "--epochs": 6,
        "--lr": 6e-4,
        "--warmup-ratio": 0.04,
        "--weight-decay": 0.01,
        "--grad-accum": 1,
        "--grad-clip": 1.0,
    },
    "evaluation": {
        "--eval-every": 0,
        "--eval-data": None,
        "--eval-rows": 64,
    },
    "run": {
        "--output-dir": MISSING,
        "--save-interval": 2000,
        "--keep-checkpoints": 0,
        "--resume": "never",
        "--queue-capacity": 1,
        "--start-timeout-s": 1800.0,
        "--stall-timeout-s": 600.0,
        "--stop-grace-s": 10.0,
        "--on-stuck": "abort",
        "--replica-check-interval": 100,
    },
    "logging": {
        "--log-format": "auto",
        "--log-interval": 10,
        "--spike-ratio": 3.0,
        "--wandb-project": None,
        "--wandb-run-name": None,
        "--tensorboard": False,
    },
}
EXIT_CODES = {"OK": 0, "FAILED": 1, "USAGE": 2, "STUCK": 70, "STOPPED": 75, "INTERRUPTED": 130}
DECODING = {
    "--target-model",
    "--max-new-tokens",
    "--raw",
    "--device",
    "--dtype",
    "--trust-remote-code",
}
COMMANDS = {
    "train": {"--config", "--rehearse"}
    | {flag for section in SURFACE.values() for flag in section},
    "config": {"--config"} | {flag for section in SURFACE.values() for flag in section},
    "prepare": {
        "source",
        *("--target-model", "--output-dir", "--max-seq-len", "--max-new-tokens", "--batch-size"),
        *("--temperature", "--top-p", "--seed", "--chat-template", "--device", "--dtype"),
        "--trust-remote-code",
    },
    "compare": {"a", "b", "--tolerance", "--json"},
    "demo": {"--work-dir"},
    "evaluate": {"checkpoint", "--data", *DECODING}
    | {"--limit", "--replay", "--tree-nodes", "--parity", "--tie-tolerance", "--json"},
    "generate": {"checkpoint", "prompts", "--tree-nodes", *DECODING},
    "export": {"checkpoint", "out", "--format", "--dtype", "--target-model", "--verifier"},
}

# The command line of the run that this project comes from, word for word.
INCIDENT = """
    dflash train --target-model PATH --data-dir tokenized_completions --output-dir checkpoints
      --target-gpus 0,1,2,3,4 --drafter-gpus 5,6,7 --epochs 6 --lr 6e-4 --warmup-ratio 0.04 --weight-decay 0.01
      --grad-accum 4 --grad-clip 1.0 --token-budget 49152 --max-seq-len 8192 --max-batch-size 64 --block-size 32
      --max-anchors 1024 --num-draft-layers 5 --gamma 10.0 --noise-start 0.05 --noise-end 0.01 --noise-type uniform
      --use-soft-labels --kl-weight 0.15 --kl-temperature 2.0 --cap-lambda 0.1 --save-interval 2000
      --wandb-project NAME --wandb-run-name NAME
"""  # noqa: E501  (verbatim)


def resolve(arguments):
    """The config that `dflash config` resolves the arguments to."""
    result = CliRunner().invoke(main, ["config", *shlex.split(arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def read(toml, tmp_path):
    path = tmp_path / "resolved.toml"
    path.write_text(toml)
    return TrainConfig.from_toml(path)


def test_the_surface_is_frozen():
    defaults = {
        section: {flag_of(field.name): field.default for field in dataclasses.fields(cls)}
        for section, cls in SECTIONS.items()
    }
    assert defaults == SURFACE
    assert {code.name: code.value for code in Exit} == EXIT_CODES
    assert {
        name: {param.opts[0] for param in command.params} for name, command in main.commands.items()
    } == COMMANDS


def test_the_command_line_of_the_eight_gpu_run_is_taken_verbatim(tmp_path):
    program, command, *arguments = shlex.split(INCIDENT)
    assert (program, command) == ("dflash", "train")
    config = read(resolve(shlex.join(arguments)), tmp_path)
    expected = {
        "model": {"target-model": "PATH", "block-size": 32, "num-draft-layers": 5},
        "data": {
            "data-dir": "tokenized_completions",
            "token-budget": 49152,
            "max-seq-len": 8192,
            "max-batch-size": 64,
        },
        "devices": {
            "target-gpus": ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"],
            "drafter-gpus": ["cuda:5", "cuda:6", "cuda:7"],
        },
        "objective": {
            "max-anchors": 1024,
            "gamma": 10.0,
            "noise-start": 0.05,
            "noise-end": 0.01,
            "noise-type": "uniform",
            "use-soft-labels": True,
            "kl-weight": 0.15,
            "kl-temperature": 2.0,
            "cap-lambda": 0.1,
        },
        "optimizer": {
            "epochs": 6,
            "lr": 6e-4,
            "warmup-ratio": 0.04,
            "weight-decay": 0.01,
            "grad-accum": 4,
            "grad-clip": 1.0,
        },
        "run": {"output-dir": "checkpoints", "save-interval": 2000},
        "logging": {"wandb-project": "NAME", "wandb-run-name": "NAME"},
    }
    assert config == TrainConfig.from_dict(expected)


def test_the_command_line_overrides_the_file_and_the_file_the_default(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\ntarget-model = 'from-file'\nblock-size = 8\n"
        "[objective]\ngamma = 4\nuse-soft-labels = true\n"
        "[data]\ndata-dir = 'd'\n[run]\noutput-dir = 'o'\n"
    )
    config = read(resolve(f"--config {path} --block-size 4 --no-use-soft-labels"), tmp_path)
    assert config.model.target_model == "from-file"
    assert config.model.block_size == 4
    assert config.objective.gamma == 4.0
    assert config.objective.use_soft_labels is False


FLAGS = [
    (section, key_of(field.name))
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if field.type is bool
]


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("section", "flag"), FLAGS)
def test_a_flag_that_is_not_given_leaves_the_files(tmp_path, section, flag, value):
    path = tmp_path / "run.toml"
    path.write_text(f"[{section}]\n{flag} = {str(value).lower()}\n")
    config = read(resolve(f"{REQUIRED} --config {path}"), tmp_path)
    assert getattr(getattr(config, section), flag.replace("-", "_")) is value


def test_what_a_run_writes_down_is_what_it_reads(tmp_path):
    given = "--use-soft-labels --cap-lambda 0.2 --sliding-window 64 --late-compile allow"
    config = read(resolve(f"{REQUIRED} {given}"), tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml())
    assert read(resolve(f"--config {path}"), tmp_path) == config
    assert config.model.num_draft_layers == 5


def test_the_merged_values_are_validated_as_a_whole(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[data]\ntoken-budget = 100\n")  # impossible alone, with the default length
    config = read(resolve(f"{REQUIRED} --config {path} --max-seq-len 100"), tmp_path)
    assert config.data.token_budget == config.data.max_seq_len == 100


def test_the_resolved_config_resolves_to_itself(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(resolve(f"{REQUIRED} --target-gpus cpu --drafter-gpus cpu,cpu --gamma 3"))
    assert resolve(f"--config {path}") == path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{REQUIRED} --block-size 1", "--block-size must be at least 2, got 1"),
        (f"{REQUIRED} --block-size x", "'x' is not a valid integer"),
        (f"{REQUIRED} --lr fast", "'fast' is not a valid float"),
        (f"{REQUIRED} --lr nan", "--lr must be a finite number, got nan"),
        (f"{REQUIRED} --noise-type pink", "'pink' is not one of 'uniform', 'gaussian'"),
        (f"{REQUIRED} --drafter-gpus gpu0", "--drafter-gpus must be GPU numbers"),
        (f"{REQUIRED} --blok-size 8", "--block-size"),
        ("--data-dir d --output-dir o", "--target-model is required"),
        (f"{REQUIRED} --config nowhere.toml", "nowhere.toml"),
    ],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_a_bad_command_line_is_a_usage_error(command, arguments, message):
    result = CliRunner().invoke(main, [command, *shlex.split(arguments)])
    assert result.exit_code == Exit.USAGE
    assert message in result.stderr
    assert f"Try 'main {command} --help' for help." in result.stderr


def test_help_shows_every_option_under_its_section_with_its_default():
    text = CliRunner().invoke(main, ["train", "--help"], terminal_width=200).stdout
    for section, cls in SECTIONS.items():
        _, _, rest = text.partition(f"\n{cls.__doc__}:\n")
        group = rest.split("\n\n")[0]
        for flag, default in SURFACE[section].items():
            assert f"  {flag} " in group
            if default is MISSING:
                assert any(flag in li and "[required]" in li for li in group.splitlines())
    assert "[default: 49152]" in text
    assert "[default: cuda:0]" in text
    assert "[default: off]" in text
