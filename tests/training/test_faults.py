"""Whatever fails, the process ends soon, says the root cause first and names the thread."""

import re
import signal
import threading
import time
from pathlib import Path

import pytest

from dflash import drafter_loop
from dflash.checkpoint import Checkpoints
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
        (drafter_loop, "block_losses", 1, "drafter-"),
        (drafter_loop, "block_losses", 5, "drafter-"),
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


def read_until(process, text: str) -> str:
    """The child's stderr up to and with the first line that contains `text`."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"the child never said {text!r}:\n{''.join(lines)}")


def test_sigterm_saves_and_the_run_can_be_resumed(options, run_child, losses):
    options["optimizer"]["epochs"] = 100
    child = run_child()
    read_until(child, "step 1/")
    child.send_signal(signal.SIGTERM)
    rest = child.communicate(timeout=150)[1]
    assert child.returncode == 75, rest
    stopped_at = int(re.search(r"stopped at step (\d+) of 600", rest)[1])
    run = Path(options["run"]["output-dir"])
    assert [path.name for path in run.glob("step-*")] == [f"step-{stopped_at:08d}"]

    options["run"]["resume"] = "auto"
    child = run_child()
    read_until(child, f"step {stopped_at + 1}/600")
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=150)[1]
    assert child.returncode == 75, rest


def test_a_second_ctrl_c_leaves_without_saving(options, run_child):
    options["optimizer"]["epochs"] = 100
    # The second signal must arrive while the first one's step is still being finished.
    slow = (
        "import threading, dflash.drafter_loop as loop\n"
        "first, held, real = [], threading.Event(), loop.DrafterTrainLoop._after_step\n"
        "def after_step(self, done, stop):\n"
        "    if stop: print('HELD', flush=True, file=__import__('sys').stderr)\n"
        "    while stop: self.shared.exchange.scope.check(); held.wait(0.01)\n"
        "    return real(self, done, stop=stop)\n"
        "loop.DrafterTrainLoop._after_step = after_step\n"
    )
    child = run_child(slow)
    read_until(child, "step 1/")
    child.send_signal(signal.SIGINT)
    read_until(child, "HELD")
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=150)[1]
    assert child.returncode == 130, rest
    assert "stopped without saving" in rest
    assert not list(Path(options["run"]["output-dir"]).glob("step-*"))


def test_a_thread_that_will_not_stop_is_named(options, run_child):
    options["run"]["stop-grace-s"] = 1.0
    stuck = (
        "import threading, dflash.target as target, dflash.drafter_loop as loop\n"
        "real, calls, stuck = target.Target.features, [], threading.Event()\n"
        "def features(self, batch, **kw):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3: stuck.set(); threading.Event().wait()\n"
        "    return real(self, batch, **kw)\n"
        "target.Target.features = features\n"
        "losses = loop.block_losses\n"
        "def fail_when_stuck(*a):\n"
        "    if len(calls) > 1: stuck.wait(); raise RuntimeError('boom')\n"
        "    return losses(*a)\n"
        "loop.block_losses = fail_when_stuck\n"
    )
    child = run_child(stuck)
    rest = child.communicate(timeout=150)[1]
    assert child.returncode == 70, rest
    assert rest.index("RuntimeError: boom") < rest.index("target-0 did not stop within 1 s")
    assert "threading.Event().wait()" in rest or "in features" in rest


def test_a_drafter_that_hangs_in_warm_up_is_named(options, run_child):
    options["run"].update({"start-timeout-s": 1.0, "stop-grace-s": 0.5})
    options["devices"]["drafter-gpus"] = "cpu,cpu"
    hang = (
        "import threading, dflash.drafter_loop as loop\n"
        "real = loop.block_losses\n"
        "def hang(*a):\n"
        "    if threading.current_thread().name == 'drafter-1': threading.Event().wait()\n"
        "    return real(*a)\n"
        "loop.block_losses = hang\n"
    )
    child = run_child(hang)
    rest = child.communicate(timeout=150)[1]
    assert child.returncode == 70, rest
    assert re.search(r"drafter-1: in 'warming up' for \d+\.\d s \(thread drafter-1\)", rest)
    assert "drafter-0: in" not in rest
