"""The target's directory: its config, tokenizer and weights, of the local disk, never of a hub."""

import hashlib
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash.errors import ModelError

SAMPLE_BYTES = 1 << 20
"""Read of a weight file at its beginning, its middle and its end: a target may have terabytes."""


def load_text_config(path: str, *, trust_remote_code: bool) -> Any:
    """The (text part of the) target's config; raises ModelError when there is none to read."""
    if not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"--target-model {path}: no config.json there",
            remedy="give the directory of a Hugging Face checkpoint",
        )
    with _loading(path):
        config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    return config.get_text_config()


def steady_positions(text_config: Any) -> int | None:
    """Tokens of a text up to which each token's keys are the same however long the text becomes.

    Rotary embeddings of the types "dynamic" and "longrope" take other frequencies in longer texts,
    for all tokens (transformers, modeling_rope_utils.dynamic_rope_update). None: no such limit.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for each in [rope, *(one for one in rope.values() if isinstance(one, dict))]:
        if each.get("rope_type") == "longrope":
            limits.append(int(each["original_max_position_embeddings"]))
        if each.get("rope_type") == "dynamic":
            limits.append(int(text_config.max_position_embeddings))
    return min(limits, default=None)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The target's tokenizer, from its local directory; raises ModelError when there is none."""
    with _loading(str(path)):
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )


def load_causal_lm(path: str, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load a causal LM from a local Hugging Face directory onto the CPU. Never asks a hub.

    Raises ModelError when it cannot be loaded, or lacks weights: those would be random numbers.
    """
    _attend_without_plans()
    with _loading(path):
        both: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    model, loaded = both
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(
            f"--target-model {path}: no weight {missing[0]!r} ({len(missing)} missing in all)",
            remedy="copy the checkpoint again, every *.safetensors file of it",
        )
    return model


def target_digest(path: Path) -> str:
    """SHA-256 of the target's config and of samples of its weight files, wherever it lies."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                weights.seek(start)
                digest.update(weights.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _attend_without_plans() -> None:
    """For the whole process: attention by kernels that take any length.

    On Hopper torch prefers cuDNN's, which plans on the host for every new shape and thread, for
    tens of milliseconds. A cache that grows is a new shape with each token, and so is nearly every
    micro-batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    """Whatever the library raises says what is wrong with the files, in many classes; where it was
    raised tells of code that the target brings along.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"--target-model {path} cannot be loaded: {type(error).__name__}: {error}"
            f" ({last.filename}:{last.lineno})",
            remedy="Check that it is the directory of a Hugging Face causal LM, copied whole.",
        ) from error
