"""A step's metrics by hand, and the share of time that stages are blocked."""

import json

import pytest
import torch

from dflash import metrics
from dflash.losses import LossSums, Objective
from dflash.metrics import StallMeter, StepMetrics

MEASURED = {
    "step": 3,
    "epoch": 1,
    "lr": 6e-4,
    "grad_norm": 0.5,
    "noise": 0.05,
    "tokens": 1000,
    "draft_positions": 64,
    "batches": 7,
    "seconds": 2.0,
}


def sums(scalars, asked, correct, prefix):
    return LossSums(
        *torch.tensor(scalars, dtype=torch.float64).unbind(),
        *torch.tensor([asked, correct, prefix]).unbind(),
    )


@pytest.fixture
def step():
    of_step = sums([8.0, 2.0, 16.0, 4.0, 3.0], [0, 10, 8, 0], [0, 5, 4, 0], [0, 5, 2, 0])
    return StepMetrics.of(of_step, Objective(0.5, 2.0, 0.1), **MEASURED)


def test_metrics_by_hand(step):
    assert (step.ce, step.kl, step.cap) == (16 / 8, 4 / 8, 3 / 2)
    assert step.loss == pytest.approx(2.0 + 0.5 * 0.5 + 0.1 * 1.5)
    assert step.accuracy == [0.5, 0.5, 0.0]
    assert step.acceptance_length == pytest.approx(1 + 5 / 10 + 2 / 8)
    assert step.tokens_per_s == 500


def test_without_a_correct_slot_cap_is_0():
    of_step = sums([8.0, 0.0, 16.0, 4.0, 0.0], [0, 4], [0, 0], [0, 0])
    wrong = StepMetrics.of(of_step, Objective(0.5, 2.0, 0.1), **MEASURED)
    assert (wrong.cap, wrong.acceptance_length) == (0.0, 1.0)


def test_a_perfect_drafter_is_accepted_whole():
    of_step = sums([8.0, 8.0, 0.0, 0.0, 0.0], [0, 4, 3, 2], [0, 4, 3, 2], [0, 4, 3, 2])
    assert StepMetrics.of(of_step, Objective(0, 1, 0), **MEASURED).acceptance_length == 4.0


def test_all_of_it_is_json(step):
    read = json.loads(json.dumps(step.to_dict()))
    assert read["tokens_per_s"] == 500
    assert {"loss", "ce", "kl", "cap", "accuracy", "acceptance_length", "stall", "queue"} < set(
        read
    )
    assert MEASURED.items() <= read.items()


def test_the_line_says_what_counts(step):
    line = step.line(total_steps=40, eta_s=3661.4)
    for part in ("step 3/40", "loss 2.400 (ce 2.000 kl 0.500 cap 1.500)", "accept 1.75"):
        assert part in line
    assert "slots 50% 50% 0%" in line and "500 tok/s" in line and "eta 1:01:01" in line


def test_an_eta_of_more_than_a_day_says_so(step):
    assert "eta 1 day, 6:00:00" in step.line(total_steps=40, eta_s=30 * 3600)


class FakeWait:
    def __init__(self):
        self.waited_s = 0.0


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 100.0

    monkeypatch.setattr(metrics.time, "monotonic", lambda: Clock.now_s)
    return Clock


def test_shares_are_blocked_time_over_elapsed_time_of_all_threads(clock):
    sender, receiver, exchange = FakeWait(), FakeWait(), FakeWait()
    receiver.waited_s = 50.0  # from before: does not count
    meter = StallMeter({"prefetch": [[sender], [FakeWait()]], "drafter": [[receiver, exchange]]})

    clock.now_s += 10
    sender.waited_s += 5
    receiver.waited_s += 2
    exchange.waited_s += 1
    assert meter.shares() == pytest.approx({"prefetch": 0.25, "drafter": 0.3})

    clock.now_s += 2
    exchange.waited_s += 1
    assert meter.shares() == pytest.approx({"prefetch": 0.0, "drafter": 0.5})


def test_a_share_is_never_more_than_all(clock):
    wait = FakeWait()
    meter = StallMeter({"target": [[wait]]})
    clock.now_s += 1
    wait.waited_s += 1.001
    assert meter.shares() == {"target": 1.0}
