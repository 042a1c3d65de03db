"""The real wandb (offline) and TensorBoard: a run's steps arrive, and its loggers may fail.

Where an extra is not installed, its tests are skipped; the sinks' own are in test_sinks.py.
"""

import json
from dataclasses import replace

import pytest

from dflash.metrics import StepMetrics
from dflash.sinks import JsonlSink, Reporter, TensorBoardSink, WandbSink

STEP = StepMetrics(
    step=1,
    epoch=0,
    lr=1e-3,
    grad_norm=0.5,
    noise=0.0,
    tokens=100,
    draft_positions=40,
    batches=7,
    seconds=0.5,
    loss=2.5,
    ce=2.5,
    kl=0.0,
    cap=0.0,
    accuracy=[0.5, 0.25, 0.0],
    acceptance_length=1.75,
)


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    module = pytest.importorskip("wandb", reason="needs: pip install 'dflash-diag[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    module.teardown()  # it reads the environment once
    yield module
    module.teardown()


@pytest.fixture
def event_accumulator():
    reason = "needs: pip install 'dflash-diag[tensorboard]'"
    pytest.importorskip("tensorboard", reason=reason)
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_wandb_offline_keeps_every_step(wandb, tmp_path):
    sink = WandbSink("project", "name", tmp_path, {"data": {"seed": 1}})
    for number in (1, 2):
        sink.step(replace(STEP, step=number, loss=float(number)))
    sink.close()
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert record.read_bytes().count(b"acceptance_length") >= 2


def test_tensorboard_reads_every_step_back(event_accumulator, tmp_path):
    sink = TensorBoardSink(tmp_path)
    for number in (1, 2):
        sink.step(replace(STEP, step=number, loss=float(number)))
    sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert [e.value for e in events.Scalars("acceptance_length")] == [1.75, 1.75]
    assert [e.value for e in events.Scalars("accuracy/slot_2")] == [0.25, 0.25]


def survives(tmp_path, broken, caplog):
    """A reporter with the broken sink and a file: all steps arrive in the file."""
    reporter = Reporter([broken, lambda: JsonlSink(tmp_path / "metrics.jsonl", 0)])
    for number in (1, 2, 3):
        reporter.step(replace(STEP, step=number))
    reporter.close()
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    assert caplog.text.count("training goes on") == 1


def test_a_run_survives_a_wandb_that_does_not_start(wandb, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "online")  # without a key, and nobody to ask for one
    survives(tmp_path, lambda: WandbSink("project", None, tmp_path, {}), caplog)


def test_a_run_survives_a_wandb_that_is_gone(wandb, tmp_path, caplog):
    def finished():
        sink = WandbSink("project", None, tmp_path, {})
        sink._run.finish()
        return sink

    survives(tmp_path, finished, caplog)


def test_a_run_survives_a_tensorboard_without_a_directory(event_accumulator, tmp_path, caplog):
    (tmp_path / "file").touch()
    survives(tmp_path, lambda: TensorBoardSink(tmp_path / "file"), caplog)


def test_a_run_survives_a_tensorboard_that_cannot_close(event_accumulator, tmp_path, caplog):
    def cannot_close():
        sink = TensorBoardSink(tmp_path / "events")
        sink._writer.close = lambda: 1 / 0
        return sink

    survives(tmp_path, cannot_close, caplog)
