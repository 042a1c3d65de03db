"""A target and a drafter, loaded to decode together."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dflash.checkpoint import find_checkpoint, load_model, load_shape, read_json
from dflash.data.generate import eos_token_ids
from dflash.decode import Step, decode_plainly, decode_steps
from dflash.decoding_options import DecodingOptions
from dflash.drafter import Drafter
from dflash.errors import CheckpointError, ConfigError
from dflash.resolve import check_device, check_fits, choose_dtype
from dflash.target import FrozenHead, Target, load_target
from dflash.target_files import load_text_config, load_tokenizer, steady_positions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """Everything on one device and in one dtype."""

    checkpoint: Path
    target_model: str
    target: Target
    drafter: Drafter
    head: FrozenHead
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]
    max_new_tokens: int

    def plain(self, prompt: list[int]) -> list[int]:
        """The target's own greedy text."""
        return decode_plainly(self.target, prompt, **self._limits(prompt))

    def steps(self, prompt: list[int], tree_nodes: int = 0) -> Iterator[Step]:
        """The passes of speculative decoding; see `decode_steps`."""
        models = (self.target, self.drafter, self.head)
        return decode_steps(*models, prompt, tree_nodes=tree_nodes, **self._limits(prompt))

    def _limits(self, prompt: list[int]) -> dict[str, Any]:
        steady, draft = steady_positions(self.target.text_config), self.drafter.config.block_size
        if steady and len(prompt) + self.max_new_tokens + draft > steady:
            raise ConfigError(
                "--max-new-tokens",
                f"must fit, with a prompt of {len(prompt)} tokens and a draft of {draft}, into"
                f" {steady}: in longer texts this target's rotary embedding takes other"
                " frequencies, for all of their tokens",
                self.max_new_tokens,
                remedy="Lower it, or leave that prompt out.",
            )
        return {"max_new_tokens": self.max_new_tokens, "eos_token_ids": self.eos_token_ids}


def load_engine(checkpoint: Path, options: DecodingOptions) -> Engine:
    """Load a drafter and its target; raises ConfigError, CheckpointError or ModelError."""
    checkpoint = find_checkpoint(checkpoint)
    target_model = options.target_model or target_of(checkpoint)
    device = _device(options.device)
    trust = options.trust_remote_code
    text_config = load_text_config(target_model, trust_remote_code=trust)
    layers = text_config.num_hidden_layers
    shape = load_shape(checkpoint, num_target_layers=layers)
    check_fits(shape, text_config, checkpoint)
    dtype = choose_dtype(options.dtype, (str(device),))
    loaded = load_target(target_model, shape.target_layer_ids, dtype, trust_remote_code=trust)
    (target,) = loaded.copies([device])
    tokenizer = load_tokenizer(target_model, trust_remote_code=trust)
    return Engine(
        checkpoint,
        target_model,
        target,
        # Rounded once, to what autocast would round them to for every draft.
        load_model(checkpoint, device, num_target_layers=layers).to(dtype),
        target.head,
        tokenizer,
        eos_token_ids(target.model, tokenizer),
        options.max_new_tokens,
    )


def target_of(checkpoint: Path) -> str:
    """The target that a checkpoint of this trainer was trained for; raises ConfigError."""
    state = checkpoint / "state.json"
    if not state.is_file():
        raise ConfigError(
            "--target-model",
            f"is needed: {checkpoint} does not say which target it is for",
            remedy="Add --target-model DIRECTORY.",
        )
    try:
        named: str = read_json(state)["config"]["model"]["target-model"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{state} names no target (no {error})", remedy="Add --target-model DIRECTORY."
        ) from error
    return named


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    check_device("--device", name)
    return torch.device(name)
