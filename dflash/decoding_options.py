"""Options of the commands that decode, as groups of `--help`; see `sections` for how they work."""

import dataclasses

from dflash.errors import ConfigError
from dflash.fields import Section, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions(Section):
    """Decoding"""

    target_model: str | None = option(
        None,
        help="directory of the target (without it: the one that the checkpoint names)",
        unit="path",
    )
    max_new_tokens: int = option(
        128, help="longest continuation of a prompt", unit="tokens", at_least=1
    )
    raw: bool = option(False, help="give prompts as they are, without the chat template")
    device: str = option("auto", help="cuda:N, cpu, or auto: a GPU if there is one", unit="device")
    dtype: str = option(
        "auto",
        help="dtype of weights and activations; auto is bfloat16 where the device has it",
        choices=("auto", "bfloat16", "float32"),
    )
    trust_remote_code: bool = option(
        False, help="run Python code that the target's directory brings along"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Section):
    """What is measured"""

    limit: int | None = option(
        None, help="prompts of each set (without it: all)", unit="prompts", at_least=1
    )
    replay: bool = option(
        False, help="only tau, from stored greedy completions: about twenty times faster"
    )
    tree_nodes: tuple[int, ...] | None = option(
        None, help="also draft trees with these node budgets, such as 8,16,32", unit="nodes"
    )
    parity: bool = option(
        False, help="also compare each slot under the training mask and in decoding"
    )
    tie_tolerance: float | None = option(
        None,
        help="where a text differs from the target's own, two logits this near are a tie and no "
        "mistake (without it: 0.25 in bfloat16, 0.001 in float32)",
        unit="logits",
        at_least=0,
    )
    json: bool = option(False, help="print one JSON object instead of tables")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_nodes and self.tree_nodes[0] < 1:
            raise ConfigError("--tree-nodes", "must be at least 1", self.tree_nodes[0])
        if self.parity and self.replay:
            raise ConfigError(
                "--parity", "needs real decoding", remedy="Leave out --replay or --parity."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(Section):
    """Drafts"""

    tree_nodes: int = option(
        0, help="draft a tree of this many nodes instead of a block", unit="nodes", at_least=0
    )
