"""`dflash export`: a checkpoint in a layout that others read, checked as it lies on disk."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dflash.checkpoint import (
    find_checkpoint,
    load_model,
    load_shape,
    read_json,
    write_model,
)
from dflash.drafter import Drafter
from dflash.durable import staged
from dflash.engine import target_of
from dflash.errors import CheckpointError, ModelError
from dflash.layouts import Verifier, speculators_config, zlab_config
from dflash.resolve import check_fits
from dflash.target_files import load_text_config


def export(
    checkpoint: Path,
    out: Path,
    layout: str,
    *,
    dtype: str,
    target_model: str | None,
    verifier: str | None,
) -> Path:
    """Write `checkpoint` to the directory `out`, which appears whole or not at all.

    Args:
        layout: z-lab or speculators. dtype: of the weights.
        target_model: directory of the target, checked against the checkpoint if given; only the
            speculators layout needs it, and takes the one that the checkpoint names without it.
        verifier: how a speculators checkpoint names its target; without it, that directory.

    Raises CheckpointError or ModelError, naming the field, weight or file.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already", remedy="remove it or choose another name")
    checkpoint = find_checkpoint(checkpoint)
    if layout == "speculators" and target_model is None:
        target_model = target_of(checkpoint)
    text_config = load_text_config(target_model, trust_remote_code=False) if target_model else None
    layers = text_config.num_hidden_layers if text_config else None
    drafter = load_model(checkpoint, num_target_layers=layers)
    if text_config:
        check_fits(drafter.config, text_config, checkpoint)
    if layout == "speculators":
        named = Verifier(verifier or str(target_model), _architectures(Path(str(target_model))))
        config = speculators_config(drafter.config, named, dtype)
    else:
        config = zlab_config(drafter.config, dtype)
    try:
        with staged(out) as staging:
            write_model(staging, config, drafter, getattr(torch, dtype))
            _check_written(staging, drafter, getattr(torch, dtype), layers)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out} could not be written: {error}", remedy="make room there, or choose another name"
        ) from error
    return out


def _architectures(target_model: Path) -> list[str]:
    named: list[str] | None = read_json(target_model / "config.json").get("architectures")
    if not named:
        raise ModelError(f"{target_model}/config.json: no field 'architectures'")
    return named


def _check_written(
    directory: Path, drafter: Drafter, dtype: torch.dtype, layers: int | None
) -> None:
    """Read back what was written: names and shapes, every field, every number."""
    if (found := load_shape(directory, num_target_layers=layers)) != drafter.config:
        raise CheckpointError(f"{directory}/config.json reads as {found}, not {drafter.config}")
    written: dict[str, Any] = load_model(directory, num_target_layers=layers).state_dict()
    for name, tensor in drafter.state_dict().items():
        if not written[name].isfinite().all():
            raise CheckpointError(
                f"weight {name!r} has values that {dtype} cannot hold, up to "
                f"{float(tensor.abs().max()):.3g}",
                remedy="type --dtype bfloat16 or --dtype float32",
            )
        if not written[name].equal(tensor.to(dtype).float()):
            raise CheckpointError(f"weight {name!r} reads otherwise than it was written")
