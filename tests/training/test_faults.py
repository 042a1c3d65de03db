"""Whatever fails, the process ends soon, says the root cause first and names the thread."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch

from dflash import checkpoint, drafter_loop, forward_backward, trainer
from dflash.checkpoint import Checkpoints, load_model, load_state
from dflash.concurrency import Gate
from dflash.config import TrainConfig
from dflash.prefetch import BatchSource
from dflash.target import Target
from dflash.trainer import train

DEADLINE_S = 10


class BoomError(Exception):
    """The injected fault."""


class FaultAt:
    """Wraps a function: the call number `call` raises."""

    def __init__(self, function, call: int) -> None:
        self.function, self.call = function, call
        self.count, self.raised_s = 0, None
        self.lock = threading.Lock()

    def install(self, monkeypatch, owner, name: str) -> None:
        fault = self

        def wrapper(*args, **kwargs):
            with fault.lock:
                fault.count += 1
                mine = fault.count
            if mine == fault.call:
                fault.raised_s = time.monotonic()
                raise BoomError(f"injected into {name}")
            return fault.function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize(
    ("owner", "name", "call", "thread"),
    [
        # Call 1 of batch and features makes the warm-up sample in the main thread.
        (BatchSource, "batch", 4, "prefetch-"),
        (Target, "features", 3, "target-"),
        (drafter_loop, "build_drafter", 2, "drafter-"),
        (forward_backward, "block_losses", 1, "drafter-"),
        (forward_backward, "block_losses", 5, "drafter-"),
        (drafter_loop, "apply_step", 3, "drafter-"),
        (Checkpoints, "save", 1, "drafter-0"),
    ],
    ids=[
        "prefetch",
        "target",
        "drafter while building",
        "drafter while warming up",
        "drafter mid-step",
        "drafter updating",
        "drafter saving",
    ],
)
def test_an_exception_in_any_stage_ends_the_run(options, monkeypatch, owner, name, call, thread):
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    fault = FaultAt(getattr(owner, name), call)
    fault.install(monkeypatch, owner, name)
    assert train(TrainConfig.from_dict(options)) == 1
    assert time.monotonic() - fault.raised_s < DEADLINE_S
    ours = ("prefetch-", "target-", "drafter-")
    assert not [t.name for t in threading.enumerate() if t.name.startswith(ours)]
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    first = log[log.index(" failure") :]
    assert first.index(f"BoomError: injected into {name}") < len(first.partition("then ")[0])
    assert re.search(rf"in thread {thread}\S* of group train", first)
    assert not list(Path(options["run"]["output-dir"]).glob("step-*"))


def test_memory_that_is_full_comes_with_what_to_lower(options, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(forward_backward, "block_losses", full)
    assert train(TrainConfig.from_dict(options)) == 1
    ended_well(options, thread="drafter-", message="OutOfMemoryError: CUDA out of memory")
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert "what to do: Lower --token-budget" in log


def ended_well(options, *, thread, message):
    """Every thread of the run is gone, its log names the culprit, its checkpoints are whole."""
    ours = ("prefetch-", "target-", "drafter-")
    assert not [t.name for t in threading.enumerate() if t.name.startswith(ours)]
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    first = log[log.index(" failure") :]
    assert message in first.partition("what to do")[0].partition("failure 2")[0]
    assert re.search(rf"in thread {thread}\S* of group train", first)
    for path in Path(options["run"]["output-dir"]).glob("step-*"):
        load_state(path)


@pytest.mark.parametrize("thread", ["prefetch-", "target-"])
def test_an_exception_before_the_gate_opens(options, monkeypatch, thread):
    wait = Gate.wait

    def failing(gate):
        if threading.current_thread().name.startswith(thread):
            raise BoomError("injected before the gate")
        return wait(gate)

    monkeypatch.setattr(Gate, "wait", failing)
    assert train(TrainConfig.from_dict(options)) == 1
    ended_well(options, thread=thread, message="BoomError: injected before the gate")


@pytest.mark.parametrize(
    ("owner", "name", "thread", "is_past_the_step"),
    [
        # The step that is saved takes micro-batches 0 and 1, and drafter-1's calls 0 (warming up)
        # and 1.
        (BatchSource, "batch", "prefetch-", lambda call, args: args[1] >= 2),
        (Target, "features", "target-", lambda call, args: args[1].index >= 2),
        (forward_backward, "block_losses", "drafter-1", lambda call, args: call >= 2),
    ],
    ids=["prefetch", "target", "drafter"],
)
def test_an_exception_elsewhere_while_a_checkpoint_is_saved(
    options, monkeypatch, owner, name, thread, is_past_the_step
):
    """The save is not torn: it ends, and what it saved can be resumed from."""
    options["run"]["save-interval"] = 1
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    saving, raised = threading.Event(), threading.Event()
    save, real = Checkpoints.save, getattr(owner, name)
    calls = iter(range(10**6))

    def slow_save(*args):
        saving.set()
        assert raised.wait(DEADLINE_S)
        return save(*args)

    def failing(*args, **kwargs):
        mine = threading.current_thread().name.startswith(thread)
        if mine and is_past_the_step(next(calls), args):
            assert saving.wait(DEADLINE_S)
            raised.set()
            raise BoomError("injected while saving")
        return real(*args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", slow_save)
    monkeypatch.setattr(owner, name, failing)
    assert train(TrainConfig.from_dict(options)) == 1
    ended_well(options, thread=thread, message="BoomError: injected while saving")
    assert [p.name for p in Path(options["run"]["output-dir"]).glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("module", "name", "thread", "says"),
    [
        (trainer, "run_prefetch", "target-", "ended before item"),
        # Its neighbours on both sides see it, and either may be the first to fail.
        (trainer, "run_target", "drafter-", "ended before item|the last receiver is gone"),
        (drafter_loop.DrafterTrainLoop, "_step", "drafter-", "the last receiver is gone"),
    ],
    ids=["prefetch", "target", "drafter"],
)
def test_a_thread_that_leaves_without_a_word(options, monkeypatch, module, name, thread, says):
    """Not an exception, not a hang: it just returns early, with its ends closed cleanly."""
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    real, left_s = getattr(module, name), []

    def leaves_early(*args):
        if name == "_step" and args[0].rank == 0:
            return real(*args)
        if name == "_step":
            left_s.append(time.monotonic())
            return True  # it was the last step
        share = iter(list(next(arg for arg in args if hasattr(arg, "__next__")))[:1])
        args = [share if hasattr(arg, "__next__") else arg for arg in args]
        real(*args)
        left_s.append(time.monotonic())
        return None

    monkeypatch.setattr(module, name, leaves_early)
    assert train(TrainConfig.from_dict(options)) == 1
    assert time.monotonic() - left_s[0] < DEADLINE_S
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert re.search(says, log)
    assert not list(Path(options["run"]["output-dir"]).glob("step-*"))


def test_a_target_that_gives_nan_is_named_with_the_row(options, monkeypatch):
    options["devices"].update({"target-gpus": "cpu,cpu", "drafter-gpus": "cpu,cpu"})
    options["run"]["save-interval"] = 1
    features, poisoned = Target.features, {}

    def poison(self, batch, **kwargs):
        out = features(self, batch, **kwargs)
        if batch.index == 3:
            poisoned["row"] = batch.rows[1]
            out.features_TF[batch.lengths[0] + 1, 5] = float("nan")
        return out

    monkeypatch.setattr(Target, "features", poison)
    assert train(TrainConfig.from_dict(options)) == 1
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert "NonFiniteError: step 2: the gradient's norm is nan" in log
    row = poisoned["row"]
    assert (
        f"target-1 gave no finite features for row(s) {row} of --data-dir, in micro-batch 3" in log
    )
    (saved,) = Path(options["run"]["output-dir"]).glob("step-*")
    assert saved.name == "step-00000001"
    assert all(p.isfinite().all() for p in load_model(saved).parameters())


def test_nan_that_is_not_the_targets_says_so(options, monkeypatch):
    losses = forward_backward.block_losses
    calls = iter(range(10**6))

    def broken(*args):
        main_PD, cap_PD, sums = losses(*args)
        return main_PD * (float("nan") if next(calls) == 2 else 1.0), cap_PD, sums

    monkeypatch.setattr(forward_backward, "block_losses", broken)
    assert train(TrainConfig.from_dict(options)) == 1
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert "step 2: the gradient's norm is nan; the target's features were finite" in log


def test_a_full_disk_ends_the_run_with_what_is_free(options, monkeypatch):
    options["run"]["save-interval"] = 2
    save_file = checkpoint.save_file
    calls = iter(range(10**6))

    def full(tensors, path, **kwargs):
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return save_file(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert train(TrainConfig.from_dict(options)) == 1
    run = Path(options["run"]["output-dir"])
    log = (run / "train.log").read_text()
    assert re.search(r"step 4 could not be saved: .*No space left.*\d+ MiB are free there", log)
    assert "--keep-checkpoints" in log
    assert sorted(p.name for p in run.iterdir() if p.is_dir()) == ["step-00000002"]
    load_state(run / "step-00000002")


def test_diverged_replicas_are_noticed(options, monkeypatch):
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    options["run"]["replica-check-interval"] = 1
    apply_step = drafter_loop.apply_step

    def nudged(model, *args, **kwargs):
        norm = apply_step(model, *args, **kwargs)
        if threading.current_thread().name == "drafter-1":
            next(model.parameters()).data.view(-1)[0] += 1e-3
        return norm

    monkeypatch.setattr(drafter_loop, "apply_step", nudged)
    assert train(TrainConfig.from_dict(options)) == 1
    log = (Path(options["run"]["output-dir"]) / "train.log").read_text()
    assert "step 1: drafter-1 differ(s) from drafter-0" in log
