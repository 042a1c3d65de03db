"""`dflash train --rehearse`: it prints what the run needs, and leaves the run as it was."""

import logging
import re
from pathlib import Path

import pytest

from dflash import rehearse as module
from dflash.config import TrainConfig
from dflash.rehearse import rehearse
from dflash.target import Target
from dflash.trainer import train


@pytest.fixture
def said(options, caplog):
    """A function that rehearses; returns the exit code and the log."""

    def run(**changes):
        for section, values in changes.items():
            options[section].update(values)
        with caplog.at_level(logging.INFO, "dflash"):
            code = rehearse(TrainConfig.from_dict(options))
        return code, caplog.text

    return run


def everything_below(directory: Path) -> list[str]:
    return sorted(str(path) for path in directory.rglob("*"))


def test_it_measures_and_leaves_nothing(options, said, tmp_path):
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    options["optimizer"]["epochs"] = 4
    code, log = said()
    assert code == 0
    assert everything_below(tmp_path) == []
    assert re.search(r"checkpoint: \d+\.\d MiB, saved in .* the same when saved again", log)
    columns = r"target +head +drafter +optimizer +gradients +queued +the rest +peak of all"
    assert re.search(columns, log)
    assert re.search(r"cpu( +\d+\.\d\d){8} of \d+\.\d\d", log)
    assert re.search(r"replay of row \d+: acceptance length \d", log)
    assert re.search(r"the whole run, 12 steps on \d+ tokens with 1 checkpoints: about 0:00:", log)
    assert "1 checkpoint(s) to keep and one being written" in log
    assert "rehearsal passed" in log


def test_the_largest_batches_come_first(options, said, monkeypatch):
    options["data"].update({"max-batch-size": 3})
    seen = []
    features = Target.features
    monkeypatch.setattr(
        Target,
        "features",
        lambda self, batch, **kw: seen.append(batch) or features(self, batch, **kw),
    )
    whole = []
    extremes = module._extremes
    monkeypatch.setattr(module, "_extremes", lambda run: whole.append(run) or extremes(run))
    assert said()[0] == 0
    (run,) = whole
    tokens = [run.source.lengths[b.rows].sum() for b in run.source.plan.batches]
    assert len(seen[0].tokens_T) == max(tokens) > min(tokens)


def test_the_run_that_follows_is_as_if_nothing_had_been(options, said, losses, tmp_path):
    assert said()[0] == 0
    assert train(TrainConfig.from_dict(options)) == 0
    rehearsed = losses()
    options["run"]["output-dir"] = str(tmp_path / "without")
    assert train(TrainConfig.from_dict(options)) == 0
    assert losses() == rehearsed


def test_what_the_run_would_refuse_is_refused_now(options, said):
    assert train(TrainConfig.from_dict(options)) == 0
    before = everything_below(Path(options["run"]["output-dir"]))
    code, log = said()
    assert (code, "already holds a run" in log) == (1, True)
    assert everything_below(Path(options["run"]["output-dir"])) == before
    code, _ = said(run={"resume": "auto"})
    assert code == 0
    assert everything_below(Path(options["run"]["output-dir"])) == before


def test_a_run_of_one_step_can_be_rehearsed(options, said):
    code, log = said(data={"max-batch-size": 64, "token-budget": 100000}, optimizer={"epochs": 1})
    assert code == 0
    assert "the whole run, 1 steps" in log


def test_what_fails_in_it_fails_it(options, said, monkeypatch, tmp_path):
    def broken(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(module, "replay", broken)
    code, log = said()
    assert (code, "RuntimeError: boom" in log) == (1, True)
    assert everything_below(tmp_path) == []
