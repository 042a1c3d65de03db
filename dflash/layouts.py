"""config.json of the public DFlash layouts: z-lab's, which SGLang reads too, and speculators'.

Both hold the same 11 n + 3 weights and the Qwen3 fields of the drafter's layers; they differ in
where those fields stand, and in how captured layers are numbered. Reading is strict: a field that
is not known could change what the drafter computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash.drafter_config import DrafterConfig, are_layers
from dflash.errors import CheckpointError

SPECULATORS_VERSION = "0.9.0"  # of the layout that is written here
REMEDY = "give another checkpoint: this one is damaged, or of a kind that is not DFlash's"
INTEGERS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
}
FIXED = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "rope_scaling": None}
# Says nothing about the forward pass, or is checked through other fields.
INERT = {
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
}
SHAPED = {"rms_norm_eps", "rope_theta", "rope_parameters"} | {
    "layer_types",
    "sliding_window",
    "use_sliding_window",
}
QWEN3_FIELDS = {*INTEGERS, *FIXED, *INERT, *SHAPED}
ZLAB_FIELDS = {*QWEN3_FIELDS, "block_size", "num_target_layers", "dflash_config"}
SPECULATORS_FIXED = {
    "speculators_model_type": "dflash",
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
}
SPECULATORS_FIELDS = {
    *INERT,
    *SPECULATORS_FIXED,
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
    "block_size",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    "target_hidden_size",
}


@dataclass(frozen=True)
class Verifier:
    """The target that a speculators checkpoint was made for, as it names it."""

    name_or_path: str
    architectures: list[str]


def zlab_config(config: DrafterConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of z-lab's layout.

    rope_theta stands at top level as well as in rope_parameters, and block_size inside
    dflash_config as well as at top level: readers differ.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
        },
        **_qwen3_fields(config, dtype),
    }


def speculators_config(config: DrafterConfig, verifier: Verifier, dtype: str) -> dict[str, Any]:
    """config.json of speculators' layout, as vLLM reads it.

    Captured layers are numbered as HF numbers hidden states: layer id + 1. The last one has no
    number of its own there; raises CheckpointError for a drafter that captures it.
    """
    if config.num_target_layers - 1 in config.target_layer_ids:
        raise CheckpointError(
            f"the drafter captures the target's last layer ({config.num_target_layers - 1}), which "
            "the speculators layout cannot name",
            remedy="type --format z-lab, or train with other --target-layer-ids",
        )
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        **SPECULATORS_FIXED,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": vars(verifier),
        },
        "transformer_layer_config": _qwen3_fields(config, dtype),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": None,
        "dtype": dtype,
        "tie_word_embeddings": False,
    }


def drafter_from(
    public: Mapping[str, Any], where: str, num_target_layers: int | None = None
) -> DrafterConfig:
    """The drafter that a config.json of either layout describes; `where` names it in errors.

    `num_target_layers` is needed where the file does not say it: in speculators' layout.
    Raises CheckpointError naming the field that is missing, unknown or cannot be honoured.
    """
    if "speculators_model_type" in public:
        return _from_speculators(_Fields(where, public), num_target_layers)
    return _from_zlab(_Fields(where, public))


def _qwen3_fields(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    window = config.sliding_window or None
    return {
        **{name: getattr(config, ours) for name, ours in INTEGERS.items()},
        **FIXED,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": _layer_types(config.num_layers, config.sliding_window),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": config.num_layers,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _layer_types(layers: int, window: int) -> list[str]:
    kind = "sliding_attention" if window else "full_attention"
    return [*[kind] * (layers - 1), "full_attention"]


class _Fields:
    """Fields of a config.json, read strictly."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} must hold fields, got {values!r}", remedy=REMEDY)
        self.where, self.values = where, values

    def need(self, name: str) -> Any:
        """The value of a field that must be there."""
        if name not in self.values:
            raise CheckpointError(f"{self.where}: no field {name!r}", remedy=REMEDY)
        return self.values[name]

    def count(self, name: str) -> int:
        """A whole number, 0 or more."""
        value = self.need(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(name, "must be a whole number")
        return value

    def number(self, name: str) -> float:
        """Any number."""
        value = self.need(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        return float(value)

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of them."""
        values = self.need(name)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.wrong(name, "must be a list of whole numbers")
        return tuple(values)

    def within(self, name: str) -> "_Fields":
        """The fields inside a field."""
        return _Fields(f"{self.where}: {name}", self.need(name))

    def only(self, known: set[str], fixed: Mapping[str, Any]) -> None:
        """Refuse a field that is not known, or is not what this drafter can do."""
        for name in sorted(set(self.values) - known):
            raise CheckpointError(
                f"{self.where}: unknown field {name!r}, got {self.values[name]!r}",
                remedy="remove it from a copy of the file if it does not change the forward pass",
            )
        for name, value in fixed.items():
            if self.values.get(name, value) != value:
                raise self.wrong(name, f"must be {value!r}")

    def wrong(self, name: str, rule: str) -> CheckpointError:
        """The error of a field's value."""
        return CheckpointError(
            f"{self.where}: {name} {rule}, got {self.values.get(name)!r}", remedy=REMEDY
        )


def _from_zlab(fields: _Fields) -> DrafterConfig:
    fields.only(ZLAB_FIELDS, FIXED)
    dflash = fields.within("dflash_config")
    dflash.only({"mask_token_id", "target_layer_ids", "block_size"}, {})
    holder = fields if "block_size" in fields.values else dflash
    block_size = holder.count("block_size")
    if dflash.values.get("block_size", block_size) != block_size:
        raise dflash.wrong("block_size", f"must be the {block_size} of the top level")
    return _drafter(
        fields,
        block_size=block_size,
        mask_token_id=dflash.count("mask_token_id"),
        target_layer_ids=dflash.counts("target_layer_ids"),
        num_target_layers=fields.count("num_target_layers"),
    )


def _from_speculators(fields: _Fields, num_target_layers: int | None) -> DrafterConfig:
    fields.only(SPECULATORS_FIELDS, SPECULATORS_FIXED)
    layers = fields.within("transformer_layer_config")
    layers.only(QWEN3_FIELDS, FIXED)
    if fields.count("draft_vocab_size") != layers.count("vocab_size"):
        raise fields.wrong("draft_vocab_size", f"must be vocab_size, {layers.count('vocab_size')}")
    if fields.values.get("target_hidden_size") not in (None, layers.count("hidden_size")):
        raise fields.wrong("target_hidden_size", "must be null or the drafter's hidden_size")
    if num_target_layers is None:
        raise CheckpointError(
            f"{fields.where}: the speculators layout does not say how many layers the target has",
            remedy="name the target with --target-model",
        )
    return _drafter(
        layers,
        block_size=fields.count("block_size"),
        mask_token_id=fields.count("mask_token_id"),
        target_layer_ids=tuple(i - 1 for i in fields.counts("aux_hidden_state_layer_ids")),
        num_target_layers=num_target_layers,
    )


def _drafter(fields: _Fields, **of_dflash: Any) -> DrafterConfig:
    """From the Qwen3 fields, and from those of DFlash, whose places differ."""
    numbers: dict[str, Any] = {ours: fields.count(name) for name, ours in INTEGERS.items()}
    # Qwen3's configs may name a window that they do not use.
    window = (fields.values.get("sliding_window") or 0) * bool(
        fields.values.get("use_sliding_window")
    )
    expected = _layer_types(numbers["num_layers"], window)
    if fields.values.get("layer_types") not in (None, expected):
        raise fields.wrong("layer_types", f"must be {expected}")
    config = DrafterConfig(
        **numbers,
        **of_dflash,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        sliding_window=window,
        bos_token_id=fields.values.get("bos_token_id"),
        eos_token_id=fields.values.get("eos_token_id"),
        pad_token_id=fields.values.get("pad_token_id"),
    )
    _check_ranges(fields.where, config)
    return config


def _check_ranges(where: str, config: DrafterConfig) -> None:
    layers, ids = config.num_target_layers, config.target_layer_ids
    rules = {
        **{name: (getattr(config, name) >= 1, "must be at least 1") for name in INTEGERS.values()},
        "block_size": (config.block_size >= 2, "must be at least 2"),
        "mask_token_id": (
            config.mask_token_id < config.vocab_size,
            f"must be below vocab_size, {config.vocab_size}",
        ),
        "target_layer_ids": (
            bool(ids) and are_layers(ids, layers),
            f"must be increasing layers of the target, 0 to {layers - 1}",
        ),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise CheckpointError(
                f"{where}: {name} {rule}, got {getattr(config, name)}", remedy=REMEDY
            )


def _rope_theta(fields: _Fields) -> float:
    """transformers 4 has it at top level, transformers 5 in rope_parameters."""
    rope = fields.values.get("rope_parameters") or {}
    theta = rope.get("rope_theta", fields.values.get("rope_theta"))
    if rope.get("rope_type", "default") != "default":
        raise fields.wrong("rope_parameters", "must be of rope_type 'default'")
    if theta is None or fields.values.get("rope_theta", theta) != theta:
        raise fields.wrong("rope_theta", f"must be that of rope_parameters, {theta}")
    return float(theta)
