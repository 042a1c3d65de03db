"""What a run needs: memory for each device, and disk."""

import logging
import os
import resource
import shutil
from collections import defaultdict
from pathlib import Path

import torch

from dflash.all_reduce import have_gpus_of_their_own
from dflash.target import Target
from dflash.trainer import Run

log = logging.getLogger(__name__)

PARTS = ("target", "head", "drafter", "optimizer", "gradients", "queued")


def report_memory(run: Run, targets: list[Target], drafter_bytes: int) -> None:
    """Log, for each device, what is known to lie there, its peak so far and its size.

    `drafter_bytes` are those of one drafter's weights in float32.
    """
    log.info("memory in GiB   %s  the rest  peak of all", "  ".join(PARTS))
    for device, parts in _known_parts(run, targets, drafter_bytes).items():
        peak, size = _peak_and_size(device)
        known = [parts[part] for part in PARTS]
        rest = max(0, peak - sum(known))
        columns = "  ".join(
            f"{_gib(value):>{len(name)}}" for name, value in zip(PARTS, known, strict=True)
        )
        name = str(device)
        log.info("  %-14s%s  %8s  %s of %s", name, columns, _gib(rest), _gib(peak), _gib(size))
    log.info("  the rest: activations and logits at their largest, libraries, fragmentation")


def report_disk(directory: Path, checkpoints: int, nbytes: int) -> None:
    """Log what the checkpoints that will be kept take, a warning if there is no room for them."""
    free = shutil.disk_usage(directory).free
    need = (checkpoints + 1) * nbytes  # one more while the next is being written
    log.log(
        logging.INFO if need <= free else logging.WARNING,
        "disk: %d checkpoint(s) to keep and one being written take %s GiB, %s GiB are free%s",
        checkpoints,
        _gib(need),
        _gib(free),
        "" if need <= free else ": not enough; see --keep-checkpoints",
    )


def _known_parts(
    run: Run, targets: list[Target], drafter_bytes: int
) -> dict[torch.device, dict[str, int]]:
    """Bytes by device and part, as far as they follow from shapes."""
    parts: dict[torch.device, dict[str, int]] = defaultdict(lambda: dict.fromkeys(PARTS, 0))
    for target in targets:  # those on one device share their weights
        parts[target.device]["target"] = _weights(target)
    # What computes: the weights themselves, or a copy in the target's precision.
    working = drafter_bytes * run.dtype.itemsize // torch.float32.itemsize
    for name in run.config.devices.drafter_gpus:
        here = parts[torch.device(name)]
        here["head"] = 0 if here["target"] else _head(run, targets[0])
        here["drafter"] += drafter_bytes + (0 if run.dtype == torch.float32 else working)
        here["optimizer"] += 2 * drafter_bytes
        # Those of one backward pass, as they come, and what they are added to.
        here["gradients"] += working + _sums(run) * drafter_bytes
        here["queued"] += len(targets) * run.config.run.queue_capacity * _batch(run)
    return dict(parts)


def _sums(run: Run) -> int:
    """Float32 gradients that a drafter holds: each part's own, and their sum over the replicas."""
    devices = [torch.device(name) for name in run.config.devices.drafter_gpus]
    parts = 1 + (run.config.objective.cap_lambda > 0)
    if len(devices) > 1:
        return parts if have_gpus_of_their_own(devices) else 2 * parts
    chunks = 1 if run.shapes is None else run.shapes.chunks
    is_single = run.config.optimizer.grad_accum == chunks == parts == 1
    return 0 if is_single else parts  # see GradientSums


def _weights(target: Target) -> int:
    tensors = {id(t): t for t in (*target.model.parameters(), *target.model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _head(run: Run, target: Target) -> int:
    """Bytes of the embeddings and lm_head that a device without a target gets a copy of."""
    tables = {id(t): t for t in (target.head.embedding_VD, target.head.head_VD)}
    return sum(table.numel() for table in tables.values()) * run.dtype.itemsize


def _batch(run: Run) -> int:
    """Bytes of the largest micro-batch's features."""
    layers = len(run.shape.target_layer_ids) + run.config.objective.use_soft_labels
    return run.config.data.token_budget * layers * run.shape.hidden_size * run.dtype.itemsize


def _peak_and_size(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device), size
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, size


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
