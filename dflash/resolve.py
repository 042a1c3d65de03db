"""Choices left open by the options, made once, and logged with their reason."""

import importlib.util
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.checkpoint import find_checkpoint, load_model, load_shape
from dflash.config import TrainConfig
from dflash.drafter import Drafter
from dflash.drafter_config import DrafterConfig, are_layers, drafter_config
from dflash.errors import CheckpointError, ConfigError, MissingExtraError
from dflash.fields import as_text
from dflash.prefetch import BatchSource
from dflash.shapes import ShapePolicy
from dflash.size_choice import choose_sizes
from dflash.target_files import load_text_config, load_tokenizer, steady_positions

log = logging.getLogger(__name__)

# Settings that change logits after lm_head; the drafter's consumers apply the bare lm_head.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
DEVICE = re.compile(r"cpu|cuda(:(0|[1-9]\d?))?")
"""torch's own numbers of devices end at 127, with an error of its own."""
LINEAR_ATTENTION_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Packages that transformers takes kernels from, and the distributions that have them."""


def check_devices(config: TrainConfig) -> None:
    """Raise ConfigError for a device that this machine does not have."""
    devices = config.devices
    for option, names in (
        ("--target-gpus", devices.target_gpus),
        ("--drafter-gpus", devices.drafter_gpus),
    ):
        for name in names:
            check_device(option, name)


def check_device(option: str, name: str) -> None:
    """Raise ConfigError unless this machine has the device."""
    if not DEVICE.fullmatch(name):
        raise ConfigError(
            option,
            "must be cpu, cuda or cuda:N",
            name,
            remedy="Name a device that `nvidia-smi -L` lists, such as cuda:0, or cpu.",
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            option,
            f"must name devices of this machine, which has {torch.cuda.device_count()} "
            "CUDA device(s)",
            name,
            remedy="Name a device that `nvidia-smi -L` lists, or cpu.",
        )


def check_loggers(config: TrainConfig) -> None:
    """Raise MissingExtraError when a logger was asked for that is not installed."""
    wanted = {
        "wandb": bool(config.logging.wandb_project),
        "tensorboard": config.logging.tensorboard,
    }
    for package, asked in wanted.items():
        if asked and not is_installed(package):
            raise MissingExtraError(package, package)


def is_installed(package: str) -> bool:
    """Whether it can be imported; nothing is."""
    spec = importlib.util.find_spec(package)
    # A bare folder of that name in the working directory is a spec too, without an origin.
    return spec is not None and spec.origin is not None


def missing_kernels(text_config: Any, devices: Sequence[str]) -> list[str]:
    """Distributions without which the target's linear attention runs in plain torch on a GPU."""
    layers = getattr(text_config, "layer_types", None) or ()
    if "linear_attention" not in layers or set(devices) == {"cpu"}:
        return []
    packages = LINEAR_ATTENTION_KERNELS.items()
    return [name for package, name in packages if not is_installed(package)]


def warn_of_missing_kernels(text_config: Any, devices: Sequence[str]) -> None:
    """Say it before the night, and what to type; transformers says it in the first forward."""
    if missing := missing_kernels(text_config, devices):
        log.warning(
            "%d of the target's %d layers are linear attention, which transformers runs in plain "
            "torch, correct but much slower, without its kernels: pip install %s",
            text_config.layer_types.count("linear_attention"),
            len(text_config.layer_types),
            " ".join(missing),
        )


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the forward passes; the drafter's weights and its optimizer stay float32."""
    devices = (*config.devices.target_gpus, *config.devices.drafter_gpus)
    return choose_dtype(config.model.dtype, devices)


def choose_dtype(asked: str, devices: Sequence[str]) -> torch.dtype:
    """The dtype asked for; with `auto`, bfloat16 where all devices have it."""
    if asked != "auto":
        log.info("dtype: %s, as asked", asked)
        return getattr(torch, asked)
    if "cpu" in devices:
        log.info("dtype: float32, a stage runs on the CPU")
        return torch.float32
    capability = min(torch.cuda.get_device_capability(device) for device in devices)
    if capability >= (8, 0):
        log.info("dtype: bfloat16, compute capability %d.%d", *capability)
        return torch.bfloat16
    log.info("dtype: float32, compute capability %d.%d is below 8.0", *capability)
    return torch.float32


def compile_backend(config: TrainConfig) -> str:
    """The backend of torch.compile for the drafters' layers, or "none"."""
    asked, drafters = config.devices.compile, set(config.devices.drafter_gpus)
    if asked != "auto":
        if asked != "inductor" and drafters != {"cpu"}:
            log.warning(
                "--compile %s on a GPU: attention runs with dense masks, many times slower than "
                "with inductor",
                asked,
            )
        return asked
    if "cpu" in drafters:
        log.info("compile: none, a drafter runs on the CPU")
        return "none"
    log.info("compile: inductor, all drafters run on GPUs")
    return "inductor"


def shape_policy(config: TrainConfig, source: BatchSource) -> ShapePolicy:
    """The sizes that the layers are compiled for, from those of every micro-batch of the run."""
    tokens, blocks = source.sizes()
    policy = choose_sizes(
        tokens,
        blocks,
        block_size=config.model.block_size,
        chunk_slots=config.devices.draft_chunk,
    )
    log.info("compiled sizes: %s", policy)
    return policy


def drafter_shape(config: TrainConfig, resumed: Path | None = None) -> DrafterConfig:
    """The drafter for the target; raises ConfigError or ModelError when none fits.

    `resumed`: a checkpoint to look at in place of --init-from, which may be gone by then.
    """
    model = config.model
    text_config = load_text_config(model.target_model, trust_remote_code=model.trust_remote_code)
    if config.objective.use_soft_labels:
        _refuse_logit_transforms(text_config)
    _check_positions(config, text_config)
    warn_of_missing_kernels(text_config, config.devices.target_gpus)
    if model.init_from is not None:
        initial = resumed or find_checkpoint(Path(model.init_from))
        shape = _initial_shape(config, text_config, initial)
    else:
        shape = drafter_config(
            text_config,
            num_draft_layers=model.num_draft_layers,
            block_size=model.block_size,
            mask_token_id=_mask_token_id(config, text_config.vocab_size),
            target_layer_ids=model.target_layer_ids,
            sliding_window=model.sliding_window,
        )
    ids = shape.target_layer_ids
    if not are_layers(ids, shape.num_target_layers):
        raise ConfigError(
            "--target-layer-ids",
            f"must be increasing layers of the target, 0 to {shape.num_target_layers - 1}",
            ",".join(map(str, ids)),
            remedy="Name the layers, or lower --num-draft-layers, from which the default follows.",
        )
    log.info(
        "drafter: %d layers of hidden size %d, block %d, context from target layers %s of 0-%d",
        shape.num_layers,
        shape.hidden_size,
        shape.block_size,
        ",".join(map(str, ids)),
        shape.num_target_layers - 1,
    )
    return shape


def initial_drafter(config: TrainConfig, shape: DrafterConfig) -> Drafter | None:
    """The drafter of --init-from, whose `shape` has been checked; None without that option."""
    if config.model.init_from is None:
        return None
    directory = find_checkpoint(Path(config.model.init_from))
    log.info("starting from the weights of %s, with a fresh optimizer", directory)
    return load_model(directory, num_target_layers=shape.num_target_layers)


def check_fits(shape: DrafterConfig, text_config: Any, checkpoint: Path) -> None:
    """Raise CheckpointError unless the drafter was made for a target of these sizes."""
    for name, has, wants in (
        ("hidden size", shape.hidden_size, text_config.hidden_size),
        ("vocabulary size", shape.vocab_size, text_config.vocab_size),
        ("number of target layers", shape.num_target_layers, text_config.num_hidden_layers),
    ):
        if has != wants:
            raise CheckpointError(
                f"{checkpoint} was made for another target: its {name} is {has}, the target's "
                f"{wants}",
                remedy="name the target that it was trained for with --target-model",
            )


def _initial_shape(config: TrainConfig, text_config: Any, directory: Path) -> DrafterConfig:
    """The shape of --init-from; raises ConfigError where an option asks for another one."""
    model = config.model
    shape = load_shape(directory, num_target_layers=text_config.num_hidden_layers)
    check_fits(shape, text_config, directory)
    has = {
        "--num-draft-layers": (shape.num_layers, model.num_draft_layers),
        "--block-size": (shape.block_size, model.block_size),
        "--mask-token-id": (shape.mask_token_id, model.mask_token_id),
        "--target-layer-ids": (shape.target_layer_ids, model.target_layer_ids),
        "--sliding-window": (shape.sliding_window, model.sliding_window),
    }
    wrong = {flag: has for flag, (has, asked) in has.items() if asked not in (None, has)}
    if wrong:
        typed = " ".join(f"{flag} {as_text(value)}" for flag, value in wrong.items())
        raise ConfigError(
            "--init-from",
            f"has a drafter of another shape than {', '.join(wrong)} ask(s) for",
            directory,
            remedy=f"Type: {typed}",
        )
    return shape


def _mask_token_id(config: TrainConfig, vocab_size: int) -> int:
    model = config.model
    token_id, source = model.mask_token_id, "as asked"
    if token_id is None:
        tokenizer = load_tokenizer(model.target_model, trust_remote_code=model.trust_remote_code)
        token_id, source = tokenizer.mask_token_id, f"the tokenizer's {tokenizer.mask_token!r}"
    if token_id is None:
        raise ConfigError(
            "--mask-token-id",
            "is needed: the target's tokenizer has no mask token",
            remedy="Name a token id that the target never uses, such as an untrained special one.",
        )
    if token_id >= vocab_size:
        raise ConfigError(
            "--mask-token-id",
            f"must be below the target's vocabulary size ({vocab_size})",
            token_id,
        )
    log.info("mask token: %d, %s", token_id, source)
    return token_id


def _check_positions(config: TrainConfig, text_config: Any) -> None:
    steady = steady_positions(text_config)
    if steady and config.data.max_seq_len > steady:
        raise ConfigError(
            "--max-seq-len",
            f"must be at most {steady} for this target: in longer texts its rotary embedding takes"
            " other frequencies, for all of their tokens",
            config.data.max_seq_len,
            remedy=f"Type --max-seq-len {steady}.",
        )
    limit = getattr(text_config, "max_position_embeddings", None)
    if limit and config.data.max_seq_len > limit:
        log.warning(
            "--max-seq-len %d is past the target's %d positions; rows of at most %d are safe",
            config.data.max_seq_len,
            limit,
            limit,
        )


def _refuse_logit_transforms(text_config: Any) -> None:
    for name in LOGIT_TRANSFORMS:
        if getattr(text_config, name, None):
            raise ConfigError(
                "--use-soft-labels",
                f"cannot be used with a target whose config sets {name}: its distribution is not "
                "softmax(lm_head(hidden))",
                getattr(text_config, name),
                remedy="Leave out --use-soft-labels.",
            )
