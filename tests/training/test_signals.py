"""Signals, threads that do not stop and threads that do not get ready: in real processes."""

import os
import re
import signal
from pathlib import Path

from dflash import drafter_loop, trainer
from dflash.checkpoint import Checkpoints
from dflash.config import TrainConfig
from dflash.rehearse import rehearse
from dflash.trainer import train

TERM = signal.SIGTERM


def test_sigterm_while_loading_leaves_nothing(options, monkeypatch):
    build = drafter_loop.build_drafter

    def told_to_stop(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return build(*args, **kwargs)

    monkeypatch.setattr(drafter_loop, "build_drafter", told_to_stop)
    assert train(TrainConfig.from_dict(options)) == 130
    assert not list(Path(options["run"]["output-dir"]).glob("step-*"))


def test_sigterm_before_anything_is_loaded_is_told_and_leaves_nothing(options, monkeypatch):
    monkeypatch.setattr(trainer, "load_targets", lambda *_, **__: signal.raise_signal(TERM))
    config = TrainConfig.from_dict(options)
    run = Path(options["run"]["output-dir"])
    for start in (train, rehearse):
        assert start(config) == 130
        assert not list(run.parent.glob("**/.rehearsal-*"))
    assert "interrupted during start-up; nothing was trained" in (run / "train.log").read_text()
    assert signal.getsignal(TERM) is signal.SIG_DFL


def test_sigterm_while_saving_ends_after_one_more_step(options, monkeypatch):
    options["run"]["save-interval"] = 2
    save = Checkpoints.save

    def told_to_stop(self, drafter, optimizer, progress):
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(self, drafter, optimizer, progress)

    monkeypatch.setattr(Checkpoints, "save", told_to_stop)
    assert train(TrainConfig.from_dict(options)) == 75
    run = Path(options["run"]["output-dir"])
    assert [p.name for p in sorted(run.glob("step-*"))] == ["step-00000002", "step-00000003"]


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
        "import threading, dflash.target as target, dflash.forward_backward as loop\n"
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
        "import threading, dflash.forward_backward as loop\n"
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
