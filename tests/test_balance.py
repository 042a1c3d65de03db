"""Which division of the GPUs would suit a run, from how its stages waited."""

import pytest

from dflash.balance import ENOUGH, BalanceSink, best_division
from dflash.rundir import run_directory
from tests.test_sinks import step


@pytest.mark.parametrize(
    ("targets", "drafters", "busy", "best"),
    [
        (5, 3, (1.0, 0.6), (6, 1 / 0.9)),  # 5 : 1.8 of work
        (5, 3, (0.5, 1.0), (4, 4 / 3)),  # 2.5 : 3
        (5, 3, (1.0, 1.0), (5, 1.0)),
        (4, 4, (1.0, 0.1), (7, 7 / 4)),
        (1, 1, (1.0, 0.2), (1, 1.0)),  # no other division
    ],
)
def test_the_best_division_of_the_gpus(targets, drafters, busy, best):
    assert best_division(targets, drafters, *busy) == (best[0], pytest.approx(best[1]))


@pytest.mark.parametrize(
    ("stall", "says"),
    [
        (
            (0.9, 0.01, 0.4),
            "the target, on 5 GPU(s), worked 99% of the time, the drafters, on 3, 60%; 6 for the "
            "target and 2 for the drafters would be about 1.10 times as fast",
        ),
        (
            (0.9, 0.01, 0.35),
            "the drafters, on 3, 65%; 6 for the target and 2 for the drafters would be about 1.02 "
            "times as fast",
        ),
        ((0.9, 0.02, 0.03), "97%; no other division of 8 GPUs would be faster"),
        ((0.0, 0.4, 0.5), "50%; both wait for batches: raise --num-prefetch-threads"),
        ((0.5, 0.4, 0.5), "the drafters, on 3, 50%\n"),
    ],
)
def test_what_is_said_at_the_end(caplog, stall, says):
    caplog.set_level("INFO", "dflash")
    sink = BalanceSink(5, 3)
    stages = ("prefetch", "target", "drafter")
    for number in range(ENOUGH):
        sink.step(step(number, stall=dict(zip(stages, stall, strict=True))))
    sink.step(step(ENOUGH, stall=dict.fromkeys(stages, 1.0)))  # an evaluation
    sink.close()
    assert says in caplog.text


def test_a_few_steps_say_nothing(caplog):
    caplog.set_level("INFO", "dflash")
    BalanceSink(5, 3).close()
    assert "balance" not in caplog.text


@pytest.mark.parametrize(
    ("targets", "drafters", "is_said"),
    [("0", "1", True), ("0", "0", False), ("0,1", "1,2", False), ("cpu", "cpu", False)],
)
def test_it_is_said_of_gpus_that_no_two_threads_share(
    train_config, caplog, targets, drafters, is_said
):
    config = train_config(devices={"target-gpus": targets, "drafter-gpus": drafters})
    with run_directory(config) as directory:
        caplog.set_level("INFO", "dflash")
        reporter = directory.reporter(0, ENOUGH)
        waits = {"prefetch": [[Never()]], "target": [[Never()]], "drafter": [[Never()]]}
        reporter.watch(waits, {})
        for number in range(1, ENOUGH + 1):
            reporter.step(step(number))
        reporter.close()
    assert ("balance: the target, on 1 GPU(s)" in caplog.text) == is_said


class Never:
    """A thread that never waits."""

    waited_s = 0.0
