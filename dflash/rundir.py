"""The output directory of a run: what is in it, what may be resumed, and where the log goes.

run.toml       the resolved configuration; `dflash train --config run.toml` repeats the run
manifest.json  which code and versions ran
train.log      everything that was logged, whatever became of the terminal
metrics.jsonl  one object per step
step-NNNNNNNN/ checkpoints
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from dflash.all_reduce import have_gpus_of_their_own
from dflash.balance import BalanceSink
from dflash.checkpoint import Checkpoints, TrainingState, load_shape, load_state
from dflash.config import TrainConfig, changed_options, determining_options
from dflash.drafter_config import DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.manifest import Manifest
from dflash.sinks import BarSink, JsonlSink, LinesSink, Reporter, Sink, TensorBoardSink, WandbSink

log = logging.getLogger(__name__)
LINE = "%(asctime)s %(levelname)s %(threadName)s %(message)s"


@dataclass(frozen=True)
class RunDirectory:
    """An output directory and the configuration that goes with it."""

    path: Path
    config: TrainConfig
    console: Console
    started_s: float = field(default_factory=time.monotonic)

    def checkpoints(self, inputs: Mapping[str, str] | None = None) -> Checkpoints:
        """The checkpoints in it; those saved from now on record the hashes of their `inputs`."""
        keep = self.config.run.keep_checkpoints
        return Checkpoints(self.path, keep, self.config.to_dict(), inputs or {})

    def resume_from(self) -> TrainingState | None:
        """The checkpoint that --resume asks for; None for a fresh run.

        Raises CheckpointError when the directory holds a run that would be mixed up with this one,
        or when the checkpoint came from options that this run changes.
        """
        asked, latest = self.config.run.resume, self.checkpoints().latest()
        if asked == "never" and latest is not None:
            raise CheckpointError(
                f"--output-dir {self.path} already holds a run, at {latest.name}",
                remedy="Type --resume auto to go on with it, or choose another --output-dir.",
            )
        if latest is None and asked in ("never", "auto"):
            return None
        state = self._newest_readable() if asked == "auto" else load_state(Path(asked))
        _refuse_changes(state, self.config)
        log.info("resuming from %s", state.directory)
        return state

    def _newest_readable(self) -> TrainingState:
        """The newest checkpoint that can be read; says which newer ones cannot."""
        for directory in reversed(self.checkpoints().all()):
            try:
                return load_state(directory)
            except CheckpointError as error:
                log.warning("%s; falling back to the checkpoint before it", error)
        raise CheckpointError(
            f"--output-dir {self.path}: none of its checkpoints can be read",
            remedy="Move them away, or choose another --output-dir, and start anew.",
        )

    def write_description(self, manifest: Manifest) -> None:
        """Save run.toml and manifest.json."""
        self.config.save_toml(self.path / "run.toml")
        (self.path / "manifest.json").write_text(manifest.to_json() + "\n", encoding="utf-8")

    def reporter(self, first_step: int, total_steps: int) -> Reporter:
        """Every sink that was asked for."""
        logs, config = self.config.logging, self.config.to_dict()
        sinks: list[Callable[[], Sink]] = []
        if project := logs.wandb_project:
            sinks.append(partial(WandbSink, project, logs.wandb_run_name, self.path, config))
        if logs.tensorboard:
            sinks.append(partial(TensorBoardSink, self.path / "tensorboard"))
        sinks.append(partial(JsonlSink, self.path / "metrics.jsonl", first_step))
        targets, drafters = self.config.devices.target_gpus, self.config.devices.drafter_gpus
        if have_gpus_of_their_own([torch.device(name) for name in (*targets, *drafters)]):
            sinks.append(partial(BalanceSink, len(targets), len(drafters)))
        if self._shows_bar():
            sinks.append(partial(BarSink, self.console, first_step, total_steps))
        else:
            sinks.append(partial(LinesSink, first_step, total_steps, logs.log_interval))
        return Reporter(sinks, logs.spike_ratio, self.started_s)

    def _shows_bar(self) -> bool:
        chosen = self.config.logging.log_format
        return chosen == "bar" or (chosen == "auto" and self.console.is_terminal)


@contextmanager
def run_directory(config: TrainConfig) -> Iterator[RunDirectory]:
    """Create --output-dir, keep other runs out of it, and log to stderr and to its train.log.

    Raises ConfigError where it cannot be written, or another run is in it.
    """
    path = Path(config.run.output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(path / "train.log", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--output-dir",
            f"must be a writable directory ({error.strerror})",
            path,
            remedy=f"Create it or choose another: mkdir -p {path}",
        ) from error
    console = Console(stderr=True, soft_wrap=True)
    with _logging_to(ConsoleHandler(console), to_file), _only_run(path):
        yield RunDirectory(path, config, console)


@contextmanager
def _only_run(path: Path) -> Iterator[None]:
    """The kernel keeps the lock for as long as this process lives, however it ends."""
    with (path / "train.log").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "--output-dir",
                "must not be another run's that still goes on",
                path,
                remedy=f"Choose another, or look at that run: dflash-diag stacks --run {path}",
            ) from error
        except OSError as error:
            log.warning("--output-dir %s cannot be locked against other runs: %s", path, error)
        yield


@contextmanager
def _logging_to(console: logging.Handler, to_file: logging.Handler) -> Iterator[None]:
    root = logging.getLogger("dflash")
    root.setLevel(logging.INFO)
    handlers = {console: "%H:%M:%S", to_file: "%Y-%m-%d %H:%M:%S"}
    for handler, clock in handlers.items():
        handler.setFormatter(logging.Formatter(LINE, clock))
        root.addHandler(handler)
    # What it warns of, such as a slow path, it prints itself; it belongs into the file as well.
    logging.getLogger("transformers").addHandler(to_file)
    try:
        yield
    finally:
        logging.getLogger("transformers").removeHandler(to_file)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


class ConsoleHandler(logging.Handler):
    """Log lines through the console that draws the progress bar, so that they do not tear it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record, without markup."""
        try:
            self._console.print(self.format(record), markup=False, highlight=False, emoji=False)
        except Exception:
            self.handleError(record)


def check_place(state: TrainingState, next_batch: int) -> None:
    """Raise CheckpointError unless the run that resumes would go on at the same micro-batch.

    It does if a step still takes as many micro-batches, however they are spread.
    """
    before = state.progress
    if next_batch != before.next_batch:
        raise CheckpointError(
            f"{state.directory} stands at micro-batch {before.next_batch}, this run would go on at"
            f" {next_batch}: drafters x --grad-accum must be {before.next_batch // before.step}, as"
            f" before, got {next_batch // before.step}",
            remedy="Change --grad-accum or --drafter-gpus so that their product is the same.",
        )


def check_shape(state: TrainingState, shape: DrafterConfig) -> None:
    """Raise CheckpointError when its drafter is another one than this run would train.

    The target's directory decides on some of it, such as the mask token.
    """
    before, now = asdict(load_shape(state.directory)), asdict(shape)
    changes = [f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]]
    if changes:
        raise CheckpointError(
            f"{state.directory} holds another drafter than this run would train:"
            f" {'; '.join(changes)}",
            remedy="Give the --target-model of its run, or start anew in another --output-dir.",
        )


def check_inputs(state: TrainingState, inputs: Mapping[str, str]) -> None:
    """Raise CheckpointError when an option's directory holds something else than it did.

    Directories may move: `inputs` maps an option to a hash of what its directory holds.
    """
    for option, digest in inputs.items():
        if state.inputs.get(option, digest) != digest:
            raise CheckpointError(
                f"{state.directory} was trained with another {option}: its content has changed"
                f" (hash {state.inputs[option][:12]} -> {digest[:12]})",
                remedy=f"Give the {option} of its run, or start anew in another --output-dir.",
            )


# What a resumed run may change: the machine, where its inputs lie (their content is checked), and
# what it no longer reads.
MAY_CHANGE = {
    ("devices", "target-gpus"),
    ("devices", "drafter-gpus"),
    ("devices", "compile"),
    ("devices", "draft-chunk"),
    ("devices", "cuda-graphs"),
    ("devices", "late-compile"),
    ("optimizer", "grad-accum"),
    ("data", "data-dir"),
    ("model", "target-model"),
    ("model", "init-from"),
}


def _refuse_changes(state: TrainingState, config: TrainConfig) -> None:
    """Raise CheckpointError naming every option that would change what is computed.

    An option that changes at most its rounding is accepted and logged.
    """
    before = determining_options(TrainConfig.from_dict(state.config, str(state.directory)))
    changes: dict[bool, list[str]] = {True: [], False: []}
    for section, key, old, new in changed_options(before, determining_options(config)):
        changes[(section, key) in MAY_CHANGE].append(f"--{key} {old} -> {new}")
    if changes[False]:
        raise CheckpointError(
            f"{state.directory} was trained with other options: {'; '.join(changes[False])}",
            remedy="Resume with the options of its run (run.toml), or start anew elsewhere.",
        )
    if changes[True]:
        log.info("resuming with %s: the same up to rounding", "; ".join(changes[True]))
