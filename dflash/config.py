"""The configuration of a training run: one frozen tree, validated once, when it is built.

A section is a group of `dflash train --help` and a table of the TOML file; a field is an option
of the same name with dashes. Nothing here looks at the file system or at torch, except that
`from_toml` and `save_toml` read and write the file they are given.
"""

import dataclasses
import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from dflash.errors import ConfigError
from dflash.fields import Section, flag_of, key_of, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Target model and drafter"""

    target_model: str = option(help="directory of the frozen Hugging Face causal LM", unit="path")
    num_draft_layers: int = option(5, help="layers of the drafter", unit="layers", at_least=1)
    block_size: int = option(
        16, help="slots of a draft block, the anchor included", unit="slots", at_least=2
    )
    target_layer_ids: tuple[int, ...] | None = option(
        None,
        help="target layers whose hidden states are the drafter's context, such as 1,9,17 "
        "(without it: spread over the target)",
        unit="layers",
    )
    mask_token_id: int | None = option(
        None,
        help="token that fills the slots to draft (without it: the tokenizer's mask token)",
        unit="token id",
        at_least=0,
    )
    sliding_window: int = option(
        0,
        help="attention window of all draft layers but the last; 0 is full attention",
        unit="tokens",
        at_least=0,
    )
    dtype: str = option(
        "auto",
        help="dtype of weights and activations; auto is bfloat16 where the device has it",
        choices=("auto", "bfloat16", "float32"),
    )
    trust_remote_code: bool = option(
        False, help="run Python code that the target's directory brings along"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data and batching"""

    data_dir: str = option(help="directory of the tokenized completions (Arrow)", unit="path")
    token_budget: int = option(
        49152, help="most tokens of a micro-batch, padding included", unit="tokens", at_least=2
    )
    max_seq_len: int = option(
        8192, help="longer documents are cut to this length", unit="tokens", at_least=2
    )
    max_batch_size: int = option(64, help="most rows of a micro-batch", unit="rows", at_least=1)
    num_prefetch_threads: int = option(
        4, help="threads that read and collate batches", unit="threads", at_least=1
    )
    seed: int = option(
        0, help="fixes initial weights, batch order, anchors and noise", unit="number", at_least=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig(Section):
    """Devices: one thread for each device named; a device may be named several times"""

    target_gpus: tuple[str, ...] = option(
        ("cuda:0",), help="where the target runs: 0,1 or cuda:0,cuda:1 or cpu", unit="devices"
    )
    drafter_gpus: tuple[str, ...] = option(
        ("cuda:0",), help="where the drafter trains, one replica for each", unit="devices"
    )

    @property
    def all_cpu(self) -> bool:
        """Whether no stage runs on a GPU."""
        return set(self.target_gpus + self.drafter_gpus) == {"cpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """Objective"""

    gamma: float = option(
        7.0, help="decay of the loss over a block's slots: exp(-(k-1)/gamma)", unit="slots", above=0
    )
    max_anchors: int = option(
        512, help="most anchors drawn from one document", unit="anchors", at_least=1
    )
    max_draft_positions: int = option(
        65536,
        help="most anchors x block-size of a micro-batch: bounds the drafter's memory",
        unit="slots",
        at_least=2,
    )
    noise_start: float = option(
        0.0, help="noise on the context features at the first step", unit="scale", at_least=0
    )
    noise_end: float = option(
        0.0, help="noise on the context features at the last step", unit="scale", at_least=0
    )
    noise_type: str = option(
        "uniform", help="distribution of the noise", choices=("uniform", "gaussian")
    )
    use_soft_labels: bool = option(False, help="add the KL divergence to the target's distribution")
    kl_weight: float = option(
        0.15, help="weight of the KL part, with --use-soft-labels", unit="weight", at_least=0
    )
    kl_temperature: float = option(
        2.0, help="softens both distributions of the KL part", unit="temperature", above=0
    )
    cap_lambda: float = option(
        0.0,
        help="weight of the entropy of correctly predicted tokens (CAP); 0 is off",
        unit="weight",
        at_least=0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer: AdamW, linear warm-up, then cosine"""

    epochs: int = option(6, help="passes over the data", unit="epochs", at_least=1)
    lr: float = option(6e-4, help="peak learning rate", unit="rate", above=0)
    warmup_ratio: float = option(
        0.04, help="part of all steps spent warming up", unit="fraction", at_least=0, below=1
    )
    weight_decay: float = option(0.01, help="decoupled weight decay", unit="rate", at_least=0)
    grad_accum: int = option(
        1, help="micro-batches of each drafter in one step", unit="batches", at_least=1
    )
    grad_clip: float = option(
        1.0, help="largest gradient norm; 0 is no clipping", unit="norm", at_least=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Run, checkpoints and time limits"""

    output_dir: str = option(help="directory for checkpoints, logs and the config", unit="path")
    save_interval: int = option(
        2000, help="steps between two checkpoints", unit="steps", at_least=1
    )
    keep_checkpoints: int = option(
        0, help="newest checkpoints that are kept; 0 keeps all", unit="count", at_least=0
    )
    resume: str = option(
        "never",
        help="never, auto (the newest complete checkpoint) or a checkpoint's path",
        unit="mode or path",
    )
    queue_capacity: int = option(
        1, help="batches that may wait in a channel", unit="batches", at_least=1
    )
    start_timeout_s: float = option(
        1800.0, help="limit for loading, compiling and warming up", unit="seconds", above=0
    )
    stall_timeout_s: float = option(
        600.0, help="limit for one unit of work after the start", unit="seconds", above=0
    )
    stop_grace_s: float = option(
        10.0, help="limit for threads to end once told to", unit="seconds", above=0
    )
    replica_check_interval: int = option(
        100, help="steps between two checks that replicas are equal", unit="steps", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """Logging"""

    log_format: str = option(
        "auto",
        help="bar for a terminal, lines for a file; auto looks at stdout",
        choices=("auto", "bar", "lines"),
    )
    log_interval: int = option(10, help="steps between two plain lines", unit="steps", at_least=1)
    wandb_project: str | None = option(
        None, help="log to this Weights & Biases project", unit="name"
    )
    wandb_run_name: str | None = option(None, help="name of the run there", unit="name")
    tensorboard: bool = option(False, help="write TensorBoard events under the output directory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything `dflash train` was told; building one validates it as a whole."""

    model: ModelConfig
    data: DataConfig
    devices: DevicesConfig = dataclasses.field(default_factory=DevicesConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    run: RunConfig
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        """Rules that span several options; each section has checked its own by now."""
        if self.data.max_seq_len > self.data.token_budget:
            raise ConfigError(
                "--max-seq-len",
                f"must be at most --token-budget ({self.data.token_budget})",
                self.data.max_seq_len,
                remedy=f"Type --token-budget {self.data.max_seq_len} or lower --max-seq-len.",
            )
        if self.objective.max_draft_positions < self.model.block_size:
            raise ConfigError(
                "--max-draft-positions",
                f"must hold at least one block of --block-size ({self.model.block_size})",
                self.objective.max_draft_positions,
                remedy="Raise --max-draft-positions or lower --block-size.",
            )
        if self.logging.wandb_run_name and not self.logging.wandb_project:
            raise ConfigError(
                "--wandb-run-name",
                "needs --wandb-project",
                self.logging.wandb_run_name,
                remedy="Add --wandb-project NAME or leave out --wandb-run-name.",
            )

    @classmethod
    def from_dict(
        cls, nested: Mapping[str, Mapping[str, Any]], source: str = "the configuration"
    ) -> Self:
        """A config from `{section: {key-with-dashes: value}}`; `source` names it in errors."""
        _refuse_unknown(nested, SECTIONS, "section", source)
        for name, values in nested.items():
            _refuse_unknown(values, _fields_by_key(name), f"key of [{name}]", source)
        return cls(**{name: _section(name, nested.get(name, {})) for name in SECTIONS})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The inverse of `from_dict`: lists for tuples, and an option that is None is left out."""
        return {name: _plain(getattr(self, name)) for name in SECTIONS}

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Read and validate the file `path`."""
        return cls.from_dict(read_toml(path), source=str(path))

    def save_toml(self, path: Path) -> None:
        """Write every option to `path`; `dflash train --config PATH` repeats the run."""
        path.write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """Every option as TOML, defaults included."""
        tables = self.to_dict().items()
        return "\n".join(f"[{name}]\n{_toml_lines(values)}" for name, values in tables)


SECTIONS: dict[str, type[Any]] = {
    field.name: field.type
    for field in dataclasses.fields(TrainConfig)
    if isinstance(field.type, type)
}


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of the file `path`, not validated yet; raises ConfigError naming `--config`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--config", f"must be a readable text file ({error})", path) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("--config", f"must be valid TOML ({error})", path) from error
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"{name!r} in {path}",
                "stands outside of any section",
                remedy=f"Put it under its section: {', '.join(f'[{name}]' for name in SECTIONS)}.",
            )
    return tables


def determining_options(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """All options that determine the trained weights, as `to_dict` gives them.

    Left out are [run], [logging] and num-prefetch-threads: where a run writes, when it saves, how
    long it waits and how it is shown do not change what it computes.
    """
    nested = config.to_dict()
    del nested["run"], nested["logging"], nested["data"]["num-prefetch-threads"]
    return nested


def config_hash(config: TrainConfig) -> str:
    """SHA-256 of the canonical JSON of `determining_options`."""
    nested = determining_options(config)
    canonical = json.dumps(nested, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _section(name: str, values: Mapping[str, Any]) -> Any:
    """The section `name` built from `values`, whose keys are known."""
    fields = _fields_by_key(name)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in values:
            raise ConfigError(
                flag_of(field.name),
                "is required",
                remedy=f"Add --{key} PATH, or {key} under [{name}] of the --config file.",
            )
    return SECTIONS[name](**{fields[key].name: value for key, value in values.items()})


def _fields_by_key(section: str) -> dict[str, dataclasses.Field[Any]]:
    return {key_of(field.name): field for field in dataclasses.fields(SECTIONS[section])}


def _refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, source: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{name!r} in {source}", f"is not a {what}", remedy=_hint(name, known)
            )


def _hint(name: str, known: Iterable[str]) -> str:
    """Where the key `name` belongs, else the nearest of the `known` names."""
    for section in SECTIONS:
        if name in _fields_by_key(section):
            return f"It belongs under [{section}]."
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"Did you mean {near!r}? Known: {', '.join(known)}."


def _plain(section: Any) -> dict[str, Any]:
    values = dataclasses.asdict(section)
    return {
        key_of(name): list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def _toml_lines(values: Mapping[str, Any]) -> str:
    # JSON's scalars and flat lists are TOML too, but for one character that TOML wants escaped.
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    return "".join(lines).replace("\x7f", "\\u007f")
