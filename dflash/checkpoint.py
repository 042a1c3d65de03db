"""Checkpoints: a directory that is complete as soon as it has its name.

step-00002000/
  config.json              as z-lab's DFlash checkpoints have it
  model.safetensors        the drafter in bfloat16, 11 n + 3 tensors under their public names
  training.safetensors     float32 weights and AdamW's two moments
  state.json               where the run stands, and the configuration that it came from
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash import __version__
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import CheckpointError

log = logging.getLogger(__name__)
TRAINING_KINDS = ("weight", "step", "exp_avg", "exp_avg_sq")
FILES = ("config.json", "model.safetensors", "training.safetensors", "state.json")


@dataclass(frozen=True)
class Progress:
    """Optimizer steps done, and the index of the next micro-batch."""

    step: int
    next_batch: int


@dataclass(frozen=True)
class TrainingState:
    """A complete checkpoint on disk, to resume from."""

    directory: Path
    progress: Progress
    config: dict[str, Any]

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Load float32 weights and optimizer moments, bit for bit."""
        tensors = load_file(self.directory / "training.safetensors")
        names = {f"{kind}.{n}" for n, _ in drafter.named_parameters() for kind in TRAINING_KINDS}
        _check_names(self.directory, set(tensors), names)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                optimizer.state[parameter] = {
                    # Beside its parameter: the fused AdamW of a GPU counts there.
                    "step": tensors[f"step.{name}"].to(parameter.device),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(parameter.device),
                }


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one output directory."""

    directory: Path
    keep: int
    config: dict[str, Any]

    def save(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint under a hidden name, sync it to disk, then give it its name."""
        final = self.directory / f"step-{progress.step:08d}"
        staging = self.directory / f".writing-{final.name}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_model(drafter, staging)
        save_file(_training_tensors(drafter, optimizer), staging / "training.safetensors")
        state = {"version": __version__, "progress": asdict(progress), "config": self.config}
        _write_json(staging / "state.json", state)
        _publish(staging, final)
        log.info("saved %s", final)
        self._prune(final)
        return final

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.directory.glob("step-*") if path.is_dir())

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(self.all()), None)

    def require_latest(self) -> Path:
        """The newest complete checkpoint; raises CheckpointError when there is none."""
        latest = self.latest()
        if latest is None:
            raise CheckpointError(f"{self.directory} holds no complete checkpoint")
        return latest

    def _prune(self, newest: Path) -> None:
        """Keep the last ones up to `newest`; a resumed run may stand before older ones' steps."""
        if self.keep:
            up_to_newest = [path for path in self.all() if path.name <= newest.name]
            for path in up_to_newest[: -self.keep]:
                shutil.rmtree(path)


def load_state(directory: Path) -> TrainingState:
    """Read where a checkpoint stands; raises CheckpointError when it is not a complete one."""
    missing = [name for name in FILES if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{directory} is not a complete checkpoint: no {missing[0]}")
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        return TrainingState(directory, Progress(**state["progress"]), state["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}/state.json cannot be read: {error!r}") from error


def save_model(drafter: Drafter, directory: Path) -> None:
    """Write config.json and bfloat16 weights, as they load in z-lab's and SGLang's DFlash."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in _weights(drafter)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", public_config(drafter.config))


def load_model(directory: Path, device: torch.device | str = "cpu") -> Drafter:
    """The drafter of a checkpoint in float32; every weight must be there and no other.

    Uses the float32 weights where the checkpoint has them, else the bfloat16 ones.
    """
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: no config.json")
    config = _drafter_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    with torch.device("meta"):
        drafter = Drafter(config)
    if (directory / "training.safetensors").is_file():
        tensors = load_file(directory / "training.safetensors", device=str(device))
        prefix = "weight."
        weights = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
    else:
        bf16 = load_file(directory / "model.safetensors", device=str(device))
        weights = {name: tensor.float() for name, tensor in bf16.items()}
    _check_names(directory, set(weights), set(drafter.state_dict()))
    drafter.load_state_dict(weights, assign=True)
    return drafter


def public_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a public DFlash checkpoint.

    rope_theta stands at top level as well as in rope_parameters, and block_size inside
    dflash_config as well as at top level: readers differ.
    """
    layers = config.num_layers
    window = config.sliding_window or None
    sliding = [bool(config.window(i)) for i in range(layers)]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "block_size": config.block_size,
        },
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _drafter_config(public: dict[str, Any]) -> DrafterConfig:
    dflash = public["dflash_config"]
    return DrafterConfig(
        hidden_size=public["hidden_size"],
        intermediate_size=public["intermediate_size"],
        num_layers=public["num_hidden_layers"],
        num_heads=public["num_attention_heads"],
        num_key_value_heads=public["num_key_value_heads"],
        head_dim=public["head_dim"],
        vocab_size=public["vocab_size"],
        rms_norm_eps=public["rms_norm_eps"],
        rope_theta=public["rope_theta"],
        max_positions=public["max_position_embeddings"],
        block_size=public["block_size"],
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=public["num_target_layers"],
        # Qwen3's configs may name a window that they do not use.
        sliding_window=(public["sliding_window"] or 0) if public["use_sliding_window"] else 0,
        bos_token_id=public.get("bos_token_id"),
        eos_token_id=public.get("eos_token_id"),
        pad_token_id=public.get("pad_token_id"),
    )


def _check_names(directory: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        wrong = sorted(found ^ expected)
        what = "unknown" if wrong[0] in found else "missing"
        raise CheckpointError(
            f"{directory}: {what} weight {wrong[0]!r} ({len(wrong)} wrong in all)"
        )


def _weights(drafter: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in drafter.named_parameters():
        yield name, parameter.detach().cpu().contiguous()


def _training_tensors(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"weight.{name}": tensor for name, tensor in _weights(drafter)}
    for name, parameter in drafter.named_parameters():
        for key in TRAINING_KINDS[1:]:
            tensors[f"{key}.{name}"] = optimizer.state[parameter][key].cpu().contiguous()
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, final: Path) -> None:
    """fsync the files and their directory before the rename, and the parent after it."""
    for path in (*staging.iterdir(), staging):
        _fsync(path)
    if final.exists():
        shutil.rmtree(final)
    staging.rename(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
