"""A tiny trained target, greedy completions that it writes once per session, and short runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dflash.config import TrainConfig

TARGET = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3"
VERBS = ("open", "read", "parse", "write", "split", "find", "load", "close", "send", "sort")
THINGS = ("file", "config", "header", "cache", "lines", "module")


def _prompts() -> list[str]:
    return [
        f'    def {verb}_{thing}(self):\n        """{verb.capitalize()} the {thing}.\n'
        for verb in VERBS
        for thing in THINGS
    ]


def _write(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dflash.data.completions import write_completions
    from dflash.data.generate import generate, meta

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    prompts = [(text, tokenizer(text)["input_ids"]) for text in _prompts()]
    done = list(
        generate(model, tokenizer, prompts, source="tests", max_new_tokens=64, batch_size=60)
    )
    write_completions(directory / "heldout", done[::5], meta(TARGET, max_new_tokens=64))
    train = [one for i, one in enumerate(done) if i % 5]
    write_completions(directory / "train", train, meta(TARGET, max_new_tokens=64))


@pytest.fixture(scope="session")
def completions(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Directory with `train` (48 rows) and `heldout` (12 rows), shared by all test processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "completions"
    with FileLock(f"{shared}.lock", timeout=120):
        if not shared.exists():
            _write(shared)
    return shared


@pytest.fixture
def options(completions: Path, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """A run of 6 steps on the CPU, as nested options; tests change what they are about."""
    return {
        "model": {"target-model": str(TARGET), "num-draft-layers": 2, "block-size": 4},
        "data": {
            "data-dir": str(completions / "train"),
            "token-budget": 1024,
            "max-seq-len": 128,
            "max-batch-size": 8,
        },
        "devices": {"target-gpus": "cpu", "drafter-gpus": "cpu"},
        "objective": {"gamma": 4.0, "max-anchors": 8},
        "optimizer": {"epochs": 1, "lr": 2e-3},
        "run": {"output-dir": str(tmp_path / "run"), "stop-grace-s": 5.0},
        "logging": {"log-format": "lines", "log-interval": 1},
    }


@pytest.fixture
def run_child(options: dict[str, dict[str, Any]], tmp_path: Path) -> Callable[..., Any]:
    """Start `dflash train` with the options in a real process, after running `patch` in it."""

    def start(patch: str = "") -> subprocess.Popen[str]:
        path = tmp_path / "run.toml"
        TrainConfig.from_dict(options).save_toml(path)
        code = f"{patch}\nfrom dflash.cli import main\nmain(['train', '--config', {str(path)!r}])"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )

    return start


@pytest.fixture
def losses(options: dict[str, dict[str, Any]]) -> Callable[[], dict[int, float]]:
    """Read step -> loss from the run's metrics.jsonl; a repeated step keeps its last value."""

    def read() -> dict[int, float]:
        path = Path(options["run"]["output-dir"]) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {row["step"]: row["loss"] for row in rows}

    return read


@pytest.fixture
def torch_as_it_is() -> Iterator[None]:
    """No isolation and no compiled code before or after, whatever ran in this process."""
    import torch

    from dflash import compile as compile_module

    def reset() -> None:
        if compile_module._current is not None:
            compile_module._current.remove()
        torch._dynamo.reset()

    reset()
    yield
    reset()
