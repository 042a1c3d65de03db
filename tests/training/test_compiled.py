"""Drafter threads that compile: the same losses, with torch isolated, and the gate behind it."""

import logging

import pytest
import torch

from dflash.config import TrainConfig
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
