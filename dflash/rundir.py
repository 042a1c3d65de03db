"""The output directory of a run: what is in it, what may be resumed, and where the log goes.

run.toml       the resolved configuration; `dflash train --config run.toml` repeats the run
manifest.json  which code and versions ran
train.log      everything that was logged, whatever became of the terminal
metrics.jsonl  one object per step
step-NNNNNNNN/ checkpoints
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dflash.checkpoint import Checkpoints, TrainingState, load_state
from dflash.config import TrainConfig, determining_options
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

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in it."""
        return Checkpoints(self.path, self.config.run.keep_checkpoints, self.config.to_dict())

    def resume_from(self) -> TrainingState | None:
        """The checkpoint that --resume asks for; None for a fresh run.

        Raises CheckpointError when the directory holds a run that would be mixed up with this one,
        or when the checkpoint came from options that this run changes.
        """
        asked, latest = self.config.run.resume, self.checkpoints.latest()
        if asked == "never" and latest is not None:
            raise CheckpointError(
                f"--output-dir {self.path} already holds a run, at {latest.name}",
                remedy="Type --resume auto to go on with it, or choose another --output-dir.",
            )
        directory = latest if asked in ("never", "auto") else Path(asked)
        if directory is None:
            return None
        state = load_state(directory)
        _refuse_changes(state, self.config)
        log.info("resuming from %s", directory)
        return state

    def write_description(self, manifest: Manifest) -> None:
        """Save run.toml and manifest.json."""
        self.config.save_toml(self.path / "run.toml")
        (self.path / "manifest.json").write_text(manifest.to_json() + "\n", encoding="utf-8")

    def reporter(self, first_step: int, total_steps: int) -> Reporter:
        """Every sink that was asked for."""
        logs = self.config.logging
        sinks: list[Sink] = []
        if logs.wandb_project:
            config = self.config.to_dict()
            sinks.append(WandbSink(logs.wandb_project, logs.wandb_run_name, self.path, config))
        if logs.tensorboard:
            sinks.append(TensorBoardSink(self.path / "tensorboard"))
        sinks.append(JsonlSink(self.path / "metrics.jsonl", first_step))
        if self._shows_bar():
            sinks.append(BarSink(self.console, first_step, total_steps))
        else:
            sinks.append(LinesSink(first_step, total_steps, logs.log_interval))
        return Reporter(sinks)

    def _shows_bar(self) -> bool:
        chosen = self.config.logging.log_format
        return chosen == "bar" or (chosen == "auto" and self.console.is_terminal)


@contextmanager
def run_directory(config: TrainConfig) -> Iterator[RunDirectory]:
    """Create --output-dir and log to stderr and to its train.log from here on."""
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
    handlers: list[logging.Handler] = [ConsoleHandler(console), to_file]
    root = logging.getLogger("dflash")
    root.setLevel(logging.INFO)
    for handler, clock in zip(handlers, ("%H:%M:%S", "%Y-%m-%d %H:%M:%S"), strict=True):
        handler.setFormatter(logging.Formatter(LINE, clock))
        root.addHandler(handler)
    try:
        yield RunDirectory(path, config, console)
    finally:
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


def _refuse_changes(state: TrainingState, config: TrainConfig) -> None:
    before = determining_options(TrainConfig.from_dict(state.config, str(state.directory)))
    now = determining_options(config)
    changed = [
        f"--{key} {before[section].get(key)} -> {now[section].get(key)}"
        for section in now
        for key in sorted({*before[section], *now[section]})
        if before[section].get(key) != now[section].get(key)
    ]
    if changed:
        raise CheckpointError(
            f"{state.directory} was trained with other options: {'; '.join(changed)}",
            remedy="Resume with the options of its run (run.toml), or start anew elsewhere.",
        )
