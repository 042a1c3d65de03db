"""Stages on different GPUs: the losses of one GPU, equal replicas, an end in bounded time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash.all_reduce import AllReduce
from dflash.batches import TargetFeatures
from dflash.config import TrainConfig
from dflash.cuda_graphs import GraphedPasses
from dflash.drafter_loop import DrafterTrainLoop
from dflash.streams import Lanes, Ready, own_stream
from dflash.trainer import train

pytestmark = [pytest.mark.gpu(2), pytest.mark.usefixtures("torch_as_it_is")]

ROOT = Path(__file__).parents[2]
LAYOUTS = [("0", "1"), ("0", "0,1"), ("0,1", "0,1")]


@pytest.fixture
def on_gpus(options):
    options["model"]["dtype"] = "float32"
    options["devices"]["compile"] = "none"
    options["optimizer"]["epochs"] = 2
    options["objective"] |= {"use-soft-labels": True, "cap-lambda": 0.1}
    return options


def losses_on(options, losses, targets, drafters, name):
    options["devices"] |= {"target-gpus": targets, "drafter-gpus": drafters}
    options["run"]["output-dir"] = str(Path(options["run"]["output-dir"]).with_name(name))
    # Whatever the number of drafters, a step takes two micro-batches.
    options["optimizer"]["grad-accum"] = 2 // len(drafters.split(","))
    options["run"]["replica-check-interval"] = 1
    assert train(TrainConfig.from_dict(options)) == 0
    return losses()


@pytest.mark.parametrize("compiled", ["none", "inductor"])
@pytest.mark.parametrize(("targets", "drafters"), LAYOUTS)
def test_the_losses_are_those_of_one_gpu(on_gpus, losses, caplog, targets, drafters, compiled):
    """Replicas are compared bit for bit after every step."""
    caplog.set_level("INFO")
    expected = losses_on(on_gpus, losses, "0", "0", "one")
    on_gpus["devices"]["compile"] = compiled
    got = losses_on(on_gpus, losses, targets, drafters, "two")
    assert got == pytest.approx(expected, rel=1e-3)
    assert ("summed by NCCL" in caplog.text) == (drafters == "0,1")


def test_no_collective_runs_while_a_graph_is_captured(on_gpus, losses, monkeypatch):
    events = []

    def noting(owner, name, what):
        real = getattr(owner, name)

        def noted(*args):
            result = real(*args)
            events.append(what)
            return result

        monkeypatch.setattr(owner, name, noted)

    noting(GraphedPasses, "__init__", "captured")
    noting(AllReduce, "_issue", "collective")
    expected = losses_on(on_gpus, losses, "0", "0", "one")
    on_gpus["devices"] |= {"compile": "inductor", "cuda-graphs": "on"}
    assert losses_on(on_gpus, losses, "0", "0,1", "two") == pytest.approx(expected, rel=1e-3)
    first = events.index("collective")
    assert events[:first].count("captured") >= 2
    assert set(events[first:]) == {"collective"}


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_another_gpu_waits_for_what_it_copies(make_batch, monkeypatch, waits):
    """And runs beside the maker's stream: nobody waits for the host."""
    if not waits:
        monkeypatch.setattr(Ready, "wait", lambda *_: None)
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    batch, lanes = make_batch([5]), Lanes()
    features_TF = torch.full((4096, 4096), torch.nan, device=here)
    torch.ones(1, device=there)
    torch.cuda.synchronize(here)
    with own_stream(here):
        torch.cuda._sleep(1_000_000_000)
        features_TF.fill_(1.0)
        made = TargetFeatures(batch, features_TF, None, Ready.after(here))
        sent = made.sent_to(there, lanes)
        busy = torch.cuda.Event()
        busy.record()
        assert not busy.query()  # the host came here while the maker still slept
    with own_stream(there):
        received = sent.received(there)
        read_TF = received.features_TF * 1.0
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)
    assert received.features_TF.device == there
    assert read_TF.isfinite().all() == waits


def test_a_drafter_that_dies_before_the_collective_ends_the_run(on_gpus, monkeypatch):
    real = DrafterTrainLoop._contribute

    def contribute(self, step):
        if self.rank == 1 and step == 1:
            raise RuntimeError("boom")
        return real(self, step)

    monkeypatch.setattr(DrafterTrainLoop, "_contribute", contribute)
    on_gpus["devices"] |= {"target-gpus": "0", "drafter-gpus": "0,1"}
    assert train(TrainConfig.from_dict(on_gpus)) == 1
    log = (Path(on_gpus["run"]["output-dir"]) / "train.log").read_text()
    assert "thread drafter-1" in log or "drafter-1" in log
    assert "boom" in log


def test_a_device_that_hangs_in_the_collective_ends_the_run_by_name(on_gpus, run_child):
    """A kernel on drafter 1's GPU never ends, so that no all-reduce can: exit 70, with stacks."""
    on_gpus["devices"] |= {"target-gpus": "0", "drafter-gpus": "0,1"}
    on_gpus["run"] |= {"stall-timeout-s": 10.0, "stop-grace-s": 3.0}
    on_gpus["optimizer"]["epochs"] = 50
    hang = (
        "import torch, dflash.drafter_loop as loop\n"
        "real = loop.DrafterTrainLoop._contribute\n"
        "def contribute(self, step):\n"
        "    made = real(self, step)\n"
        "    if self.rank == 1 and step == 1:\n"
        "        torch.cuda._sleep(600_000_000_000)\n"
        "        object.__setattr__(made, 'ready', loop.Ready.after(self.device))\n"
        "    return made\n"
        "loop.DrafterTrainLoop._contribute = contribute\n"
    )
    child = run_child(hang)
    try:
        said = child.communicate(timeout=120)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == 70, said
    assert re.search(r"drafter-\d did not stop within 3 s", said)


def test_there_is_no_deadlock_with_drafters_on_different_gpus(tmp_path):
    """DF012 needs one autograd thread for both: with a device each, both go on."""
    page = (ROOT / "docs" / "fxrace.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# deadlock\.py.*?)```", page, re.DOTALL)
    head, b = program.split("def b():")
    (tmp_path / "two.py").write_text(f"{head}def b():{b.replace('cuda', 'cuda:1', 1)}")
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "two.py")], capture_output=True, text=True, timeout=150
    )
    assert "no deadlock" in ended.stdout, ended.stderr
