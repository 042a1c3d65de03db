"""What a command checks and sets before it imports torch: some must, the rest is cheap."""

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from dflash.config import TrainConfig
from dflash.decoding_options import DecodingOptions
from dflash.errors import ConfigError, DflashError, MissingExtraError
from dflash.manifest import double_owners


def prepare_to_decode(decoding: DecodingOptions) -> None:
    """What can be checked before torch is imported, and has to be."""
    refuse_double_ownership()
    if decoding.target_model is not None:
        require_directory("--target-model", decoding.target_model)
    keep_bars_out_of_logs(os.environ)


def refuse_double_ownership() -> None:
    """Raise where another distribution's files are mixed with, or imported instead of, ours."""
    for owned_twice in double_owners(["dflash"]):
        raise DflashError(str(owned_twice), remedy=owned_twice.remedy)


def require_directory(option: str, path: str) -> None:
    """Raise ConfigError unless `path` is a directory: cheap, and minutes before anything loads."""
    if not Path(path).is_dir():
        raise ConfigError(
            option,
            "must be an existing directory",
            path,
            remedy=f"Check with: ls -d {path} (in the container, if the command runs in one).",
        )


def share_cores(config: TrainConfig, environ: MutableMapping[str, str], cores: int) -> str | None:
    """Divide the cores between the stage threads of a CPU-only run; returns the log line.

    Must come before torch is imported, which reads these variables once. Without it each thread
    starts an OpenMP team of all cores and the teams spin against each other.
    """
    devices = config.devices
    if not devices.all_cpu or "OMP_NUM_THREADS" in environ:
        return None
    stages = len(devices.target_gpus) + len(devices.drafter_gpus)
    per_stage = max(1, cores // stages)
    environ["OMP_NUM_THREADS"] = str(per_stage)
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    return (
        f"OMP_NUM_THREADS={per_stage} OMP_WAIT_POLICY={environ['OMP_WAIT_POLICY']}:"
        f" {cores} cores for {stages} stage threads on the CPU"
    )


def keep_bars_out_of_logs(environ: MutableMapping[str, str]) -> None:
    """Let libraries draw progress bars on a terminal only; must come before tqdm is imported."""
    if not sys.stderr.isatty():
        environ.setdefault("TQDM_DISABLE", "1")


def log_to_stderr() -> None:
    """What a command says on its way, on standard error."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dflash").setLevel(logging.INFO)


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Around the imports of a command: say which extra is missing, if one is."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(extra, error) from error


def missing_extra(extra: str, error: ModuleNotFoundError) -> Exception:
    """The import error as the error of an extra, unless it is our own module that is missing."""
    package = (error.name or "").partition(".")[0]
    return error if package in ("", "dflash") else MissingExtraError(extra, package)
