"""Drafter threads that compile: the same losses, with torch isolated, and the gate behind it."""

import logging
import threading

import pytest
import torch

from dflash.config import TrainConfig
from dflash.forward_backward import ForwardBackward
from dflash.trainer import train


def test_two_compiling_drafters_train_as_without(options, losses, tmp_path, caplog, torch_as_it_is):
    caplog.set_level(logging.INFO)
    options["devices"] |= {"drafter-gpus": "cpu,cpu"}
    assert train(TrainConfig.from_dict(options)) == 0
    plain = losses()
    options["devices"]["compile"] = "aot_eager"
    options["run"]["output-dir"] = str(tmp_path / "compiled")
    assert train(TrainConfig.from_dict(options)) == 0
    assert losses() == pytest.approx(plain, rel=1e-5)
    said = caplog.text
    assert said.count("compiled with: none") == said.count("compiled with: aot_eager") == 2
    assert said.count(f"threads that compile, torch {torch.__version__}: ") == 1


def test_nobody_captures_before_all_have_compiled(options, monkeypatch):
    options["devices"] |= {"drafter-gpus": "cpu,cpu", "compile": "none"}
    real, said, first_is_there = ForwardBackward.warm_up, [], threading.Event()

    def warm_up(self, sample, phase, others_have_compiled):
        def noted():
            said.append("compiled")
            first_is_there.set()
            others_have_compiled()
            said.append("captures")

        if threading.current_thread().name == "drafter-1":
            assert first_is_there.wait(60)
        real(self, sample, phase, noted)

    monkeypatch.setattr(ForwardBackward, "warm_up", warm_up)
    assert train(TrainConfig.from_dict(options)) == 0
    assert said == ["compiled"] * 2 + ["captures"] * 2
