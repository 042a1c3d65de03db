"""Save a checkpoint, killed or refused at one file-system call after the other; prints counts.

A program of its own, because it forks once for every call of a save: `kill_points.py DIRECTORY`.
With `naive` behind it, the control: a save that writes straight into its place must not pass.
Each time the directory holds steps 1 and 2, step 2 is saved over the older step 2, and step 1 is
pruned. Whatever happens, every directory with a checkpoint's name must be whole, one must be there,
and the next save must succeed and sweep up.
"""

import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash import checkpoint
from dflash.checkpoint import Checkpoints, Progress, load_state
from dflash.drafter import build_drafter
from dflash.drafter_config import DrafterConfig
from dflash.errors import CheckpointError
from dflash.optim import apply_step, make_optimizer
from dflash.sections import OptimizerConfig

CALLS = [
    *((os, name) for name in ("open", "close", "fsync", "rename", "mkdir", "unlink", "rmdir")),
    (io, "open"),
    (checkpoint, "save_file"),
]
# No full disk refuses to close or delete.
MAY_REFUSE = {"open", "fsync", "rename", "mkdir", "save_file"}
SHAPE = DrafterConfig(16, 24, 1, 2, 1, 8, 32, 1e-6, 1e4, 128, 4, 31, (1,), 6, 0, None, 2, None)


def trained(steps: int):
    """A drafter and its optimizer after so many steps along fixed gradients."""
    drafter = build_drafter(SHAPE, seed=0, device=torch.device("cpu"))
    optimizer = make_optimizer(drafter, OptimizerConfig())
    for step in range(steps):
        gradients = [torch.full_like(p, 0.1 * (step + 1)) for p in drafter.parameters()]
        apply_step(drafter, optimizer, gradients, lr=1e-2, clip=1.0, step=step)
    return drafter, optimizer


@contextmanager
def at(call, act):
    """Within, `act` comes before call number `call` of CALLS; yields the names called so far."""
    names, before = [], {(module, name): getattr(module, name) for module, name in CALLS}

    def wrapped(name, function):
        def wrapper(*args, **kwargs):
            names.append(name)
            if len(names) - 1 == call:
                act(name, function, args, kwargs)
            return function(*args, **kwargs)

        return wrapper

    for (module, name), function in before.items():
        setattr(module, name, wrapped(name, function))
    try:
        yield names
    finally:
        for (module, name), function in before.items():
            setattr(module, name, function)


def kill(name, function, args, kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_half_written(name, function, args, kwargs):
    """Leaves half of a tensor file, as a kill in the middle of writing it does."""
    function(*args, **kwargs)
    os.truncate(args[1], os.path.getsize(args[1]) // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(name, function, args, kwargs):
    if name in MAY_REFUSE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def start(directory: Path, older) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for step in (1, 2):
        Checkpoints(directory, 0, {}).save(*older, Progress(step, step))


def save(directory: Path, newer) -> None:
    Checkpoints(directory, 1, {}).save(*newer, Progress(2, 2))


def in_child(work) -> int:
    """The status of a fork that does `work`: 0 done, 3 CheckpointError, -9 killed."""
    if (child := os.fork()) == 0:
        try:
            work()
        except CheckpointError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(directory: Path, known, newer) -> None:
    whole = Checkpoints(directory, 0, {}).all()
    assert whole, f"no checkpoint is left: {os.listdir(directory)}"
    for path in whole:
        load_state(path)
        weights = load_file(path / "training.safetensors")["weight.fc.weight"]
        assert any(weights.equal(fc) for fc in known), f"{path} holds neither state"
    save(directory, newer)
    assert os.listdir(directory) == ["step-00000002"], os.listdir(directory)


def names_of_all_calls(directory: Path, older, newer) -> list[str]:
    start(directory, older)
    with at(-1, None) as names:
        save(directory, newer)
    return names


def interfere(directory: Path, calls: Sequence[int], act, older, newer, expected: set[int]) -> int:
    """Save once for each call, with `act` before it; returns how often."""
    known = [drafter.fc.weight.detach().clone() for drafter, _ in (older, newer)]

    def work(call):
        with at(call, act):
            save(directory, newer)

    for call in calls:
        start(directory, older)
        status = in_child(lambda call=call: work(call))
        assert status in expected, f"call {call}: status {status}"
        check(directory, known, newer)
    return len(calls)


def too_large(directory: Path, older, newer) -> int:
    """The kernel itself refuses a write: no file may grow to the size that one of them needs."""
    known = [drafter.fc.weight.detach().clone() for drafter, _ in (older, newer)]
    start(directory, older)
    sizes = sorted(path.stat().st_size for path in (directory / "step-00000002").iterdir())

    def work(size):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
        save(directory, newer)

    for size in sizes:
        start(directory, older)
        assert in_child(lambda size=size: work(size)) == 3
        check(directory, known, newer)
    return len(sizes)


def main(directory: Path) -> None:
    states = trained(1), trained(2)
    names = names_of_all_calls(directory, *states)
    everywhere = range(len(names))
    torn = [i for i, name in enumerate(names) if name == "save_file"]
    counts = {
        "calls": sorted(set(names)),
        "killed": interfere(directory, everywhere, kill, *states, {-signal.SIGKILL}),
        "torn": interfere(directory, torn, kill_half_written, *states, {-signal.SIGKILL}),
        "refused": interfere(directory, everywhere, refuse, *states, {0, 3}),
        "too_large": too_large(directory, *states),
    }
    print(json.dumps(counts))


@contextmanager
def naive(final: Path):
    """What `staged` would be without a hidden name and a rename."""
    final.mkdir(parents=True, exist_ok=True)
    yield final


if __name__ == "__main__":
    if sys.argv[2:] == ["naive"]:
        checkpoint.staged = naive
    main(Path(sys.argv[1]))
