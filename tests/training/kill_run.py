"""Train in forks that are killed at random moments, and go on; prints what came of it as JSON.

`kill_run.py RUN_TOML KILLS SEED`: RUN_TOML describes a run that nothing disturbs. Here the same
options are trained into another directory, killed KILLS times and resumed each time. After every
kill all checkpoints must be whole and at most --save-interval steps lost; in the end the weights
must be those of the undisturbed run, bit for bit.
"""

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from dflash.checkpoint import Checkpoints, load_state
from dflash.config import TrainConfig
from dflash.trainer import train

# After the line of the step, at most so long: a step with its save takes about as much.
LONGEST_DELAY_S = 0.08


def forked(config: TrainConfig) -> tuple[int, int]:
    """Start training in a fork; returns its process id and the end of a pipe with its log."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        os._exit(train(config))
    os.close(writing)
    return child, reading


def run_and_kill(config: TrainConfig, steps: int, delay_s: float) -> tuple[int | None, int]:
    """Kill after the line of the step number `steps` from here; (exit code or None, last step)."""
    child, reading = forked(config)
    seen = last = 0
    with os.fdopen(reading) as log:
        for line in log:
            if " step " in line:
                seen, last = seen + 1, int(line.split(" step ")[1].split("/")[0])
            if seen == steps:
                until_s = time.monotonic() + delay_s
                while time.monotonic() < until_s:
                    pass
                os.kill(child, signal.SIGKILL)
                break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == -signal.SIGKILL else status, last


def check(checkpoints: Checkpoints, last: int, interval: int) -> int:
    """Steps lost; every checkpoint must be readable."""
    steps = [load_state(path).progress.step for path in checkpoints.all()]
    lost = last - max(steps, default=0)
    assert lost <= interval, f"{lost} steps are lost: {steps} after step {last}"
    return lost


def main(path: Path, kills: int, seed: int) -> None:
    undisturbed = TrainConfig.from_toml(path)
    whole = Path(undisturbed.run.output_dir)
    run = dataclasses.replace(
        undisturbed.run, output_dir=str(whole.with_name("killed")), resume="auto"
    )
    config = dataclasses.replace(undisturbed, run=run)
    checkpoints = Checkpoints(Path(run.output_dir), 0, {})
    chance, lost = random.Random(seed), []
    for _ in range(kills):
        code, last = run_and_kill(config, chance.randint(1, 4), chance.uniform(0, LONGEST_DELAY_S))
        assert code is None, f"ended by itself: {code}"
        lost.append(check(checkpoints, last, run.save_interval))
    child, reading = forked(config)
    with os.fdopen(reading) as log:
        said = log.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said
    ours, theirs = (
        Checkpoints(directory, 0, {}).require_latest() / "training.safetensors"
        for directory in (Path(run.output_dir), whole)
    )
    same = ours.read_bytes() == theirs.read_bytes()
    print(json.dumps({"kills": kills, "lost": lost, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
