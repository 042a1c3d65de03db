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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from dflash.errors import ConfigError
from dflash.fields import flag_of, key_of
from dflash.sections import (
    DataConfig,
    DevicesConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything `dflash train` was told; building one validates it as a whole."""

    model: ModelConfig
    data: DataConfig
    devices: DevicesConfig = dataclasses.field(default_factory=DevicesConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
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
        if bool(self.evaluation.eval_every) != bool(self.evaluation.eval_data):
            raise ConfigError(
                "--eval-every and --eval-data",
                "must be given together",
                remedy="Add the other: --eval-every STEPS --eval-data DIRECTORY.",
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

    Left out are [evaluation], [run], [logging] and num-prefetch-threads: how a run is measured,
    where it writes, when it saves, how long it waits and how it is shown do not change what it
    computes.
    """
    nested = config.to_dict()
    for section in ("evaluation", "run", "logging"):
        del nested[section]
    del nested["data"]["num-prefetch-threads"]
    return nested


def changed_options(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Section, key, old and new value of every option that differs; None where it is not set."""
    for section in after:
        old, new = before.get(section, {}), after[section]
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                yield section, key, old.get(key), new.get(key)


def config_hash(config: TrainConfig) -> str:
    """SHA-256 of the canonical JSON of `determining_options`."""
    return hash_of(determining_options(config))


def hash_of(value: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
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
