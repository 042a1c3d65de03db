"""Sinks: what each writes, and that a failing one takes nothing down with it."""

import io
import json
import logging
import sys
import types
from dataclasses import replace

import pytest
from rich.console import Console

from dflash.metrics import StepMetrics
from dflash.sinks import BarSink, JsonlSink, LinesSink, Reporter, TensorBoardSink, WandbSink


def step(number, **changes):
    fields = {
        "step": number,
        "epoch": 0,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "noise": 0.0,
        "tokens": 100,
        "draft_positions": 40,
        "batches": 7,
        "seconds": 0.5,
        "loss": 2.5,
        "ce": 2.5,
        "kl": 0.0,
        "cap": 0.0,
        "accuracy": [0.5, 0.25, 0.0],
        "acceptance_length": 1.7,
    }
    return StepMetrics(**{**fields, **changes})


class Recorder:
    """A sink that remembers, and fails at the steps it is told to."""

    def __init__(self, fails_at=(), fails_to_close=False):
        self.steps, self.closed = [], 0
        self.fails_at, self.fails_to_close = fails_at, fails_to_close

    def step(self, metrics):
        if metrics.step in self.fails_at:
            raise ConnectionError("the server is gone")
        self.steps.append(metrics.step)

    def close(self):
        self.closed += 1
        if self.fails_to_close:
            raise ConnectionError("the server is gone")


def reporting(*sinks, **options):
    return Reporter([lambda sink=sink: sink for sink in sinks], **options)


def test_a_failing_sink_is_dropped_and_the_others_go_on(caplog):
    first, failing, last = Recorder(), Recorder(fails_at={2}), Recorder()
    reporter = reporting(first, failing, last)
    for number in (1, 2, 3):
        reporter.step(step(number))
    reporter.close()
    assert (first.steps, failing.steps, last.steps) == ([1, 2, 3], [1], [1, 2, 3])
    assert (first.closed, failing.closed, last.closed) == (1, 0, 1)
    assert "Recorder failed and is dropped" in caplog.text
    assert "the server is gone" in caplog.text


def test_a_sink_that_fails_to_close_does_not_keep_others_open():
    failing, last = Recorder(fails_to_close=True), Recorder()
    reporting(failing, last).close()
    assert (failing.closed, last.closed) == (1, 1)


def test_a_sink_that_cannot_be_opened_is_reported_once_and_left_out(caplog):
    def cannot():
        raise ConnectionError("no such project")

    last = Recorder()
    reporter = Reporter([cannot, lambda: last])
    for number in (1, 2):
        reporter.step(step(number))
    reporter.close()
    assert (last.steps, last.closed) == ([1, 2], 1)
    assert caplog.text.count("ConnectionError: no such project") == 1
    assert "cannot be started and is left out; training goes on" in caplog.text


def test_a_loss_spike_is_reported_and_passed_on_as_it_is(caplog):
    seen = []
    sink = Recorder()
    sink.step = seen.append
    reporter = reporting(sink, spike_ratio=2.0)
    losses = [2.0, 2.2, 1.8] * 5 + [9.0, 2.0]
    for number, loss in enumerate(losses, start=1):
        reporter.step(step(number, loss=loss))
    assert [metrics.loss for metrics in seen] == losses
    assert [metrics.loss_ratio for metrics in seen][:10] == [1.0] * 10
    assert seen[15].loss_ratio == 4.5
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == ["step 16: loss 9.000 is 4.5 times the usual; training goes on"]


def test_elapsed_time_counts_from_the_start_of_the_run(monkeypatch):
    monkeypatch.setattr("dflash.sinks.time.monotonic", lambda: 107.5)
    seen = []
    sink = Recorder()
    sink.step = seen.append
    reporting(sink, started_s=100.0).step(step(1))
    assert seen[0].elapsed_s == 7.5


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Recorder):
        def step(self, metrics):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reporting(Interrupted()).step(step(1))


def test_the_reporter_adds_stalls_and_queues():
    class Wait:
        waited_s = 0.0

    seen = []
    sink = Recorder()
    sink.step = seen.append
    reporter = reporting(sink)
    reporter.step(step(1))
    reporter.watch({"target": [[Wait()]]}, {"batches": lambda: (1, 4)})
    reporter.step(step(2))
    assert (seen[0].stall, seen[0].queue) == ({}, {})
    assert (seen[1].stall, seen[1].queue) == ({"target": 0.0}, {"batches": (1, 4)})


def test_jsonl_has_one_object_per_step_at_once_and_is_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start in (1, 3):
        sink = JsonlSink(path, first_step=start - 1)
        for number in (start, start + 1):
            sink.step(step(number, stall={"target": 0.25}, queue={"batches": (1, 2)}))
            last = json.loads(path.read_text().splitlines()[-1])
            assert last["step"] == number
        sink.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[0]["stall"], rows[0]["queue"]) == ({"target": 0.25}, {"batches": [1, 2]})
    assert (rows[0]["tokens_per_s"], rows[0]["accuracy"]) == (200, [0.5, 0.25, 0.0])


def test_a_line_that_a_run_was_killed_in_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, first_step=0)
    for number in (1, 2):
        sink.step(step(number))
    sink.close()
    path.write_bytes(path.read_bytes()[:-40])
    sink = JsonlSink(path, first_step=1)
    sink.step(step(2))
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_fresh_run_puts_the_metrics_of_an_earlier_one_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for number in (7, 1):
        sink = JsonlSink(path, first_step=0)
        sink.step(step(number))
        sink.close()
    kept = [json.loads(file.read_text())["step"] for file in (tmp_path / "metrics.jsonl.old", path)]
    assert kept == [7, 1]


def lines_of(caplog, first_step, total, interval):
    sink = LinesSink(first_step, total, interval)
    with caplog.at_level(logging.INFO, "dflash"):
        for number in range(first_step + 1, total + 1):
            sink.step(step(number))
        sink.close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("first_step", "shown"), [(0, [1, 10, 20, 23]), (14, [15, 20, 23]), (22, [23])]
)
def test_lines_show_the_first_every_tenth_and_the_last(caplog, first_step, shown):
    lines = lines_of(caplog, first_step, total=23, interval=10)
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/23" for n in shown]


def test_a_line_has_the_rates_of_all_steps_since_the_last(caplog):
    sink = LinesSink(first_step=0, total_steps=9, interval=3)
    with caplog.at_level(logging.INFO, "dflash"):
        sink.step(replace(step(1), stall={"target": 0.0}))
        sink.step(replace(step(2), tokens=100, seconds=0.5, stall={"target": 0.8}))
        sink.step(replace(step(3), tokens=500, seconds=1.5, stall={"target": 0.4}, loss=7.0))
    assert "200 tok/s  stall target 0%" in caplog.messages[0]
    assert "300 tok/s  stall target 50%" in caplog.messages[1]
    assert "loss 7.000" in caplog.messages[1]


def test_lines_estimate_the_time_left_from_this_runs_own_steps(caplog, monkeypatch):
    # When step 101 has ended (twice: it took 2 s, by its own account), and step 104.
    now_s = iter([2.0, 2.0, 8.0])
    monkeypatch.setattr("dflash.sinks.time.monotonic", lambda: next(now_s))
    sink = LinesSink(first_step=100, total_steps=104, interval=1)
    with caplog.at_level(logging.INFO, "dflash"):
        sink.step(replace(step(101), seconds=2.0))
        sink.step(step(104))
    assert [line.getMessage().split("eta ")[1] for line in caplog.records] == ["0:00:06", "0:00:00"]


def test_the_bar_shows_the_step_and_the_loss():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    sink = BarSink(console, first_step=4, total_steps=8)
    sink.step(step(5))
    sink.step(replace(step(6), tokens=300))
    sink.close()
    assert "6/8" in out.getvalue() and "loss 2.500  accept 1.70  400 tok/s" in out.getvalue()


class FakeLogger:
    """Stands for wandb's run and for TensorBoard's writer."""

    def __init__(self, *args, **kwargs):
        self.made_with = (args, kwargs)
        self.logged, self.closed = {}, False

    def log(self, values, step):
        self.logged[step] = values

    def add_scalar(self, name, value, step):
        self.logged.setdefault(step, {})[name] = value

    def finish(self):
        self.closed = True

    close = finish


def check_scalars(logged):
    assert (logged["loss"], logged["lr"], logged["tokens_per_s"]) == (2.5, 1e-3, 200)
    assert [logged[f"accuracy/slot_{k}"] for k in (1, 2, 3)] == [0.5, 0.25, 0.0]
    assert (logged["stall/target"], logged["queue/batches"]) == (0.25, 3)
    assert all(isinstance(value, int | float) for value in logged.values())
    assert "batches" not in logged


FULL_STEP = {"stall": {"target": 0.25}, "queue": {"batches": (3, 4)}}


def test_wandb_gets_scalars_by_step(monkeypatch, tmp_path):
    runs = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **kwargs: runs.append(FakeLogger(**kwargs)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink("project", "name", tmp_path, {"data": {"seed": 1}})
    sink.step(step(7, **FULL_STEP))
    sink.close()
    (run,) = runs
    assert run.made_with[1] == {
        "project": "project",
        "name": "name",
        "dir": str(tmp_path),
        "config": {"data": {"seed": 1}},
    }
    check_scalars(run.logged[7])
    assert run.closed


def test_tensorboard_gets_scalars_by_step(monkeypatch, tmp_path):
    writers = []
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda *args: writers.append(FakeLogger(*args)) or writers[-1]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.step(step(7, **FULL_STEP))
    sink.close()
    (writer,) = writers
    assert writer.made_with[0] == (str(tmp_path / "tensorboard"),)
    check_scalars(writer.logged[7])
    assert writer.closed
