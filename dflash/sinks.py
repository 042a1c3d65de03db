"""Where metrics go: a terminal, plain lines, JSONL, wandb, TensorBoard."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash.durable import drop_torn_line
from dflash.metrics import SpikeGuard, StallMeter, StepMetrics, Waits, with_rates_of

log = logging.getLogger(__name__)

STEPS_OF_BAR = 10  # that the speed beside a progress bar is the mean of


class Sink(Protocol):
    """Where metrics go; `close` is called once, also after a failure."""

    def step(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per step, appended and flushed."""

    def __init__(self, path: Path, first_step: int) -> None:
        """A resumed run appends, and repeats the steps since its checkpoint: the last row counts.

        A fresh run puts the file of an earlier one aside, as `metrics.jsonl.old`.
        """
        if first_step == 0 and path.exists():
            path.replace(path.with_name(f"{path.name}.old"))
        with path.open("a+b") as file:
            drop_torn_line(file)
        self._file = path.open("a", encoding="utf-8")

    def step(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(metrics.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class LinesSink:
    """A plain line every `interval` steps, with the rates since the last one and the time left."""

    def __init__(self, first_step: int, total_steps: int, interval: int) -> None:
        self._total, self._interval = total_steps, interval
        self._first_step = first_step
        self._since: list[StepMetrics] = []
        self._started_s: float | None = None

    def step(self, metrics: StepMetrics) -> None:
        done = metrics.step - self._first_step
        if self._started_s is None:  # not earlier: start-up says nothing about the steps
            self._started_s = time.monotonic() - metrics.seconds
        self._since.append(metrics)
        if done == 1 or metrics.step % self._interval == 0 or metrics.step == self._total:
            per_step_s = (time.monotonic() - self._started_s) / done
            shown = with_rates_of(self._since)
            log.info(shown.line(self._total, per_step_s * (self._total - metrics.step)))
            self._since.clear()

    def close(self) -> None:
        pass


class BarSink:
    """A progress bar on a terminal; log lines go above it."""

    def __init__(self, console: Console, first_step: int, total_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._progress.start()
        self._last: deque[StepMetrics] = deque(maxlen=STEPS_OF_BAR)
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, now="")

    def step(self, metrics: StepMetrics) -> None:
        self._last.append(metrics)
        now = (
            f"loss {metrics.loss:.3f}  accept {metrics.acceptance_length:.2f}"
            f"  {with_rates_of(self._last).tokens_per_s:.0f} tok/s"
        )
        self._progress.update(self._task, completed=metrics.step, now=now)

    def close(self) -> None:
        self._progress.stop()


class WandbSink:
    """Weights & Biases; needs the extra `wandb`."""

    def __init__(self, project: str, name: str | None, directory: Path, config: dict) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, dir=str(directory), config=config)

    def step(self, metrics: StepMetrics) -> None:
        self._run.log(_scalars(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """TensorBoard event files; needs the extra `tensorboard`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def step(self, metrics: StepMetrics) -> None:
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


class Reporter:
    """Completes a step's metrics with the pipeline's state and hands them to every sink.

    A sink that fails is reported and dropped: a run must survive its loggers.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], Sink]],
        spike_ratio: float = math.inf,
        started_s: float = 0.0,
    ) -> None:
        """`makers` open the sinks; a loss `spike_ratio` times the usual one is worth a warning.

        `started_s` is when the run began, on the monotonic clock.
        """
        self._sinks = [sink for make in makers if (sink := _opened(make)) is not None]
        self._spikes, self._spike_ratio = SpikeGuard(), spike_ratio
        self._started_s = started_s
        self._meter: StallMeter | None = None
        self._queues: Mapping[str, Callable[[], tuple[int, int]]] = {}

    def watch(
        self,
        stages: Mapping[str, Sequence[Sequence[Waits]]],
        queues: Mapping[str, Callable[[], tuple[int, int]]],
    ) -> None:
        """Tell where the stages wait and how to read the queues between them."""
        self._meter, self._queues = StallMeter(stages), queues

    def step(self, metrics: StepMetrics) -> None:
        """Report one step."""
        metrics = replace(
            metrics,
            stall=self._meter.shares() if self._meter else {},
            queue={name: read() for name, read in self._queues.items()},
            loss_ratio=self._spikes.ratio(metrics.loss),
            elapsed_s=time.monotonic() - self._started_s,
        )
        if metrics.loss_ratio >= self._spike_ratio:
            log.warning(
                "step %d: loss %.3f is %.1f times the usual; training goes on",
                metrics.step,
                metrics.loss,
                metrics.loss_ratio,
            )
        for sink in list(self._sinks):
            self._guarded(sink, "step", metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in list(self._sinks):
            self._guarded(sink, "close")

    def _guarded(self, sink: Sink, method: str, *args: Any) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception:
            self._sinks.remove(sink)
            log.exception("%s failed and is dropped; training goes on", type(sink).__name__)


def _opened(make: Callable[[], Sink]) -> Sink | None:
    """The sink, or None when it cannot be opened: reported here, once."""
    try:
        return make()
    except Exception:
        log.exception("a logger cannot be started and is left out; training goes on")
        return None


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    scalars: dict[str, float] = {}
    for name, value in metrics.to_dict().items():
        if name == "batches":
            continue  # a checksum: for `dflash compare`, nothing to plot
        if isinstance(value, list):
            scalars.update({f"{name}/slot_{k}": v for k, v in enumerate(value, start=1)})
        elif isinstance(value, dict):
            items = value.items()
            scalars.update({f"{name}/{k}": v[0] if isinstance(v, tuple) else v for k, v in items})
        else:
            scalars[name] = value
    return scalars
