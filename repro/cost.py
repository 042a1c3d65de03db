"""What a cure costs: the seconds that threads stand at locks and gates under it.

Three threads train a network of their own, compiled: at start-up each does its first step, later
on many steps, with a new shape (a recompile) half-way. Waiting for torch's own compile lock counts
too, so that the run without a cure is the one to compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import harness
import torch
from stage import Missed, me

NAMES = ("drafter-0", "drafter-1", "drafter-2")
STEPS = 20


def measure(run: harness.Run) -> harness.Finding:
    """Outcome "measured", the seconds waited as its reason; raises `Missed` if a thread fails."""
    run.stage.gate_parties = len(NAMES)
    network = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU()).to(run.device)
    networks = {name: copy.deepcopy(network) for name in NAMES}
    with run.stage.seeing_the_compile_lock(), run.cure.installed():
        compiled = {name: torch.compile(networks[name], backend="aot_eager") for name in NAMES}
        if run.cure.main_thread_first:
            for network in compiled.values():
                _step(network, 512, run.device)
        for name, network in compiled.items():
            run.start(name, lambda network=network: _steps(run, network))
        run.finish()
    for worker in run.workers:
        if worker.error:
            raise Missed(f"{worker.name}: {harness.described(worker.error)}")
    waited_s = run.stage.waited_s - (0 if run.at_start_up else run.workers[0].value)
    return harness.Finding("measured", f"{waited_s:.1f} s")


def _steps(run: harness.Run, network: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Returns the seconds that threads had waited when all were warm."""
    with run.cure.step():
        _step(network, 512, run.device)
    run.stage.reach(f"{me()} warm")
    for name in NAMES:
        run.stage.wait(f"{name} warm")
    waited_at_start_up_s = run.stage.waited_s
    for step in range(0 if run.at_start_up else STEPS):
        with run.cure.step():
            _step(network, 512 if step < STEPS // 2 else 448, run.device)
    return waited_at_start_up_s


def _step(network: Callable[[torch.Tensor], torch.Tensor], rows: int, device: str) -> None:
    network(torch.ones(rows, 256, device=device)).sum().backward()
