"""All threads on one GPU: the losses of a plain loop, and the hand-over between streams."""

import dataclasses
import logging

import pytest
import torch

from dflash.config import TrainConfig
from dflash.drafter import build_drafter
from dflash.drafter_loop import DrafterTrainLoop
from dflash.forward_backward import ForwardBackward
from dflash.gradients import Gradients
from dflash.optim import Schedule, apply_step, make_optimizer
from dflash.rundir import run_directory
from dflash.streams import Ready
from dflash.target import Target
from dflash.trainer import open_run, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_as_it_is")]

CUDA = torch.device("cuda:0")
SLEEP_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture
def on_gpu(options):
    """Two drafters and a target on one GPU, with every part of the loss."""
    options["devices"] = {"target-gpus": "0", "drafter-gpus": "0,0"}
    options["model"] |= {"dtype": "float32"}
    options["optimizer"] |= {"grad-accum": 2, "epochs": 2}
    options["objective"] |= {
        "use-soft-labels": True,
        "cap-lambda": 0.1,
        "noise-start": 0.05,
        "noise-end": 0.01,
    }
    return options


def plain_losses(config):
    """The same run as a loop in one thread, on the default stream, eager, with dense masks."""
    with run_directory(config) as directory:
        run = open_run(config, directory)
        models = run.load()
        (target,) = models.targets
        drafter = build_drafter(run.shape, seed=config.data.seed, device=CUDA)
        forward_backward = ForwardBackward(drafter, target.head, config, run.dtype)
        optimizer = make_optimizer(drafter, config.optimizer)
        schedule = Schedule(
            config.optimizer.lr, config.optimizer.warmup_ratio, run.plan.total_steps
        )
        start, end = config.objective.noise_start, config.objective.noise_end
        losses = {}
        for step in range(run.plan.total_steps):
            noise = start + step / max(1, run.plan.total_steps - 1) * (end - start)
            forward_backward.start_step()
            sums = forward_backward.no_sums()
            for index in range(step * run.plan.per_step, (step + 1) * run.plan.per_step):
                batch = run.source.batch(index)
                features = target.features(batch, soft_labels=True)
                sums += forward_backward(features, noise)
            gradients = forward_backward.finish_step()
            total, divisor = gradients.combined(sums, config.objective.cap_lambda)
            apply_step(
                drafter,
                optimizer,
                total,
                divisor=divisor,
                lr=schedule.lr(step),
                clip=config.optimizer.grad_clip,
                step=step,
                copies=forward_backward.copies,
            )
            ce, kl = float(sums.ce / sums.weight), float(sums.kl / sums.weight)
            cap = float(sums.entropy / sums.correct_weight) if sums.correct_weight else 0.0
            losses[step + 1] = ce + config.objective.kl_weight * kl + 0.1 * cap
    return losses


@pytest.mark.parametrize(
    ("dtype", "graphs", "tolerance"),
    [("float32", "off", 1e-3), ("float32", "on", 1e-3), ("bfloat16", "on", 3e-2)],
)
def test_threads_on_one_gpu_train_as_a_plain_loop(
    on_gpu, losses, tmp_path, dtype, graphs, tolerance
):
    on_gpu["model"]["dtype"] = dtype
    on_gpu["devices"]["cuda-graphs"] = graphs
    plain = {**on_gpu, "run": {"output-dir": str(tmp_path / "plain")}}
    expected = plain_losses(TrainConfig.from_dict(plain))
    assert train(TrainConfig.from_dict(on_gpu)) == 0
    assert losses() == pytest.approx(expected, rel=tolerance)
    assert len(expected) >= 3


def late(tensors):
    """Copies that hold NaN until a tenth of a second from now."""
    copies = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    torch.cuda.current_stream().synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for mine, tensor in zip(copies, tensors, strict=True):
        mine.copy_(tensor)
    return copies, Ready.after(CUDA)


@pytest.fixture
def late_features(monkeypatch):
    real = Target.features

    def features(self, batch, **kwargs):
        made = real(self, batch, **kwargs)
        if made.features_TF is None:
            return made
        (features_TF,), ready = late([made.features_TF])
        return dataclasses.replace(made, features_TF=features_TF, ready=ready)

    monkeypatch.setattr(Target, "features", features)


@pytest.fixture
def late_gradients(monkeypatch):
    real = DrafterTrainLoop._contribute

    def contribute(self, step):
        made = real(self, step)
        main, ready = late(made.gradients.main)
        return dataclasses.replace(made, gradients=Gradients(main, made.gradients.cap), ready=ready)

    monkeypatch.setattr(DrafterTrainLoop, "_contribute", contribute)


@pytest.mark.parametrize("what", ["late_features", "late_gradients"])
def test_the_hand_over_waits_for_the_other_stream(on_gpu, losses, what, request, monkeypatch):
    on_gpu["devices"]["compile"] = "none"
    assert train(TrainConfig.from_dict(on_gpu)) == 0
    expected = losses()
    request.getfixturevalue(what)
    on_gpu["run"]["output-dir"] += "-late"
    assert train(TrainConfig.from_dict(on_gpu)) == 0
    assert losses() == pytest.approx(expected, rel=1e-4)

    monkeypatch.setattr(Ready, "wait", lambda *_: None)  # the control
    on_gpu["run"]["output-dir"] += "-control"
    assert train(TrainConfig.from_dict(on_gpu)) == 1


def test_after_the_start_nothing_is_compiled(on_gpu, caplog, monkeypatch):
    """Three drafters, sealed; and with the seal a step outside of the sizes is refused."""
    caplog.set_level(logging.INFO)
    on_gpu["devices"]["drafter-gpus"] = "0,0,0"
    assert train(TrainConfig.from_dict(on_gpu)) == 0
    assert caplog.text.count("compiled with: inductor") == 3
    assert "compiled sizes: " in caplog.text
    assert "a compile after the start" not in caplog.text


@pytest.mark.parametrize(("late_compile", "code"), [("refuse", 1), ("allow", 0)])
def test_a_size_that_was_not_foreseen(on_gpu, losses, caplog, monkeypatch, late_compile, code):
    """It is refused by name; where it is allowed, three drafters compile it, beside the target."""
    from dflash.shapes import ShapePolicy

    on_gpu["devices"] |= {"drafter-gpus": "0,0,0", "late-compile": late_compile}
    real = ShapePolicy.layout

    def sometimes_larger(self, batch):
        # The first are the warm-up's sample, and one of each drafter.
        larger = tuple(dataclasses.replace(size, blocks=2 * size.blocks) for size in self.sizes)
        sizes = self.sizes if batch.index < 3 else larger
        return real(dataclasses.replace(self, sizes=sizes), batch)

    monkeypatch.setattr(ShapePolicy, "layout", sometimes_larger)
    assert train(TrainConfig.from_dict(on_gpu)) == code
    assert "a compile after the start, for tensors of shape" in caplog.text
