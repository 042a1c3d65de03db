"""Checkpoints: a directory that is complete as soon as it has its name.

step-00002000/
  config.json              as z-lab's DFlash checkpoints have it
  model.safetensors        the drafter in bfloat16, 11 n + 3 tensors under their public names
  training.safetensors     float32 weights and AdamW's two moments
  state.json               where the run stands, and the configuration that it came from
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash import __version__
from dflash.drafter import Drafter
from dflash.drafter_config import DrafterConfig
from dflash.durable import remove, staged, sweep, write_json
from dflash.errors import CheckpointError
from dflash.layouts import drafter_from, zlab_config

log = logging.getLogger(__name__)
TRAINING_KINDS = ("weight", "step", "exp_avg", "exp_avg_sq")
# What older speculators checkpoints hold besides the drafter: copies of the target's weights.
VERIFIER_OWNED = {
    f"{name}.weight" for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
}
ANOTHER_CHECKPOINT = "copy the checkpoint again, or give another"
STEP = re.compile(r"step-\d{8,}")
FORMAT = 2
"""Of what a run that is resumed relies on: counted up where its micro-batches become others."""
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
    inputs: dict[str, str]

    def restore(self, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Load float32 weights and optimizer moments, bit for bit."""
        tensors = load_file(self.directory / "training.safetensors")
        names = {f"{kind}.{n}" for n, _ in drafter.named_parameters() for kind in TRAINING_KINDS}
        _check_names(self.directory, set(tensors), names)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                # Into the memory that is there: what was loaded is the mapped file, which would
                # take disk space after it is deleted.
                for kind in TRAINING_KINDS[1:]:
                    optimizer.state[parameter][kind].copy_(tensors[f"{kind}.{name}"])


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one output directory."""

    directory: Path
    keep: int
    config: dict[str, Any]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """A hash of what the directory of an option holds, by the option's name."""

    def save(self, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint under a hidden name, sync it to disk, then give it its name.

        Raises CheckpointError, and leaves the older checkpoints as they are, when it cannot.
        """
        final = self.directory / f"step-{progress.step:08d}"
        state = {
            "version": __version__,
            "format": FORMAT,
            "progress": asdict(progress),
            "config": self.config,
            "inputs": dict(self.inputs),
        }
        try:
            sweep(self.directory)
            with staged(final) as staging:
                save_model(drafter, staging)
                save_file(_training_tensors(drafter, optimizer), staging / "training.safetensors")
                write_json(staging / "state.json", state)
        except (OSError, SafetensorError) as error:
            raise self._not_saved(progress.step, error) from error
        log.info("saved %s", final)
        self._prune(final)
        return final

    def _not_saved(self, step: int, error: Exception) -> CheckpointError:
        places = (self.directory, *self.directory.absolute().parents)
        free_mib = shutil.disk_usage(next(p for p in places if p.exists())).free / 2**20
        return CheckpointError(
            f"--output-dir {self.directory}: step {step} could not be saved: {error}"
            f" ({free_mib:.0f} MiB are free there)",
            remedy="Make room (--keep-checkpoints N keeps few), then type --resume auto.",
        )

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first; copies that somebody gave another name are none."""
        found = [path for path in self.directory.glob("step-*") if STEP.fullmatch(path.name)]
        return sorted((path for path in found if path.is_dir()), key=_step_of)

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
            up_to_newest = [path for path in self.all() if _step_of(path) <= _step_of(newest)]
            for path in up_to_newest[: -self.keep]:
                try:
                    remove(path)
                except OSError as error:
                    log.warning("%s is not kept, but cannot be deleted: %s", path, error)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_checkpoint(path: Path) -> Path:
    """`path` if it is a checkpoint, of any layout, else the newest one of the run in it.

    Raises CheckpointError when it is neither.
    """
    found = path if (path / "config.json").is_file() else Checkpoints(path, 0, {}).latest()
    if found is None:
        raise CheckpointError(
            f"{path} is no checkpoint, and holds none",
            remedy="give a directory with config.json and weights, or the --output-dir of a run",
        )
    return found


def load_state(directory: Path) -> TrainingState:
    """Read where a checkpoint stands; raises CheckpointError when it is not a complete one.

    Of the tensors only the headers are read, which tell a truncated file from a whole one.
    """
    missing = [name for name in FILES if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{directory} is not a complete checkpoint: no {missing[0]}")
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        progress = Progress(**state["progress"])
        found = TrainingState(directory, progress, state["config"], state.get("inputs", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}/state.json cannot be read: {error!r}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} was written by another dflash (format {state.get('format')}, this one"
            f" has {FORMAT}), whose micro-batches were others",
            remedy="Finish the run with that one, or start anew in another --output-dir.",
        )
    for name in ("model.safetensors", "training.safetensors"):
        _check_whole(directory / name)
    return found


def _check_whole(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def save_model(drafter: Drafter, directory: Path) -> None:
    """Write config.json and bfloat16 weights, as they load in z-lab's and SGLang's DFlash."""
    write_model(directory, zlab_config(drafter.config), drafter, torch.bfloat16)


def write_model(
    directory: Path, config: dict[str, Any], drafter: Drafter, dtype: torch.dtype
) -> None:
    """Write the public files: the given config.json, and the weights in `dtype`."""
    weights = {name: tensor.to(dtype) for name, tensor in _weights(drafter)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)


def load_shape(directory: Path, *, num_target_layers: int | None = None) -> DrafterConfig:
    """The drafter that a checkpoint's config.json describes; see `load_model`."""
    path = directory / "config.json"
    return drafter_from(read_json(path), str(path), num_target_layers)


def load_model(
    directory: Path, device: torch.device | str = "cpu", *, num_target_layers: int | None = None
) -> Drafter:
    """The drafter of a checkpoint of any layout, in float32; every weight must be there, no other.

    Uses the float32 weights where the checkpoint has them, else the public ones.
    `num_target_layers` is for the layout that does not say it. Raises CheckpointError.
    """
    with torch.device("meta"):
        drafter = Drafter(load_shape(directory, num_target_layers=num_target_layers))
    weights = _read_weights(directory, device)
    for name in VERIFIER_OWNED & set(weights):
        log.info("%s: %s is left out for the target's own", directory, name)
        del weights[name]
    _check_weights(directory, weights, drafter.state_dict())
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return drafter


def _read_weights(directory: Path, device: torch.device | str) -> dict[str, Tensor]:
    path, prefix = directory / "training.safetensors", "weight."
    if not path.is_file():
        path, prefix = directory / "model.safetensors", ""
    try:
        tensors = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            remedy="give another checkpoint, whole and with its weights in this one file",
        ) from error
    return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}


def _check_weights(
    directory: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """Names, shapes and dtypes; raises CheckpointError naming the first that is wrong."""
    _check_names(directory, set(weights), set(expected))
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape or not tensor.is_floating_point():
            raise CheckpointError(
                f"{directory}: weight {name!r} must be floating-point of shape "
                f"{list(expected[name].shape)}, got {tensor.dtype} of {list(tensor.shape)}",
                remedy="its config.json describes another drafter; copy both files again",
            )


def _check_names(directory: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        wrong = sorted(found ^ expected)
        what = "unknown" if wrong[0] in found else "missing"
        raise CheckpointError(
            f"{directory}: {what} weight {wrong[0]!r} ({len(wrong)} wrong in all)",
            remedy="copy the checkpoint again, its config.json and its weights, or give another",
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


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} is not a checkpoint: no {path.name}", remedy=ANOTHER_CHECKPOINT
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", remedy=ANOTHER_CHECKPOINT
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold an object, got {type(value).__name__}", remedy=ANOTHER_CHECKPOINT
        )
    return value
