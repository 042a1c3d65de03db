"""From a scenario to trials that can be searched: the machine, the fingerprint, the planted bug."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from fingerprint import fingerprint
from gate_bugs import Bug
from gate_model import MAIN, Machine
from gate_record import Channel
from gate_scenarios import SCENARIOS, Size, World
from gate_threads import Monitor, Thread, Waiter
from interleavings import Trial
from turns import Player

from dflash.concurrency import Gate, Receiver, Scope, Sender, TaskGroup

_END = {"name", "capacity", "_channel", "_peers", "_waited_s", "_blocked_since_s"}
# What never changes, what the frames tell already, and statistics that no code here looks at.
UNOBSERVED: dict[type, set[str]] = {
    Machine: {"atomic", "skips_vain", "early_s", "signals", "threads", "monitors", "record"},
    Monitor: {"machine"},
    Waiter: {"predicate"},
    Thread: {"_machine", "_run", "_args"},
    Scope: {"name", "waiting"},
    TaskGroup: {"name", "grace_s"},
    World: {"machine", "size", "scenario", "bug"},
    Gate: {"_timeout_s", "_parties"},
    Sender: _END - {"_channel"},
    Receiver: _END - {"_channel"},
    Channel: {"scope", "capacity", "timeout_s"},
}


@contextmanager
def prepared(
    name: str,
    size: Size,
    *,
    atomic: bool = True,
    skips_vain: bool = True,
    bug: Bug | None = None,
) -> Iterator[Callable[[], Trial]]:
    """Within, what makes the trials of a scenario."""
    scenario = SCENARIOS[name]
    machine = Machine(
        atomic=atomic,
        skips_vain=skips_vain,
        early_s=scenario.early_s,
        signals=scenario.signals,
    )

    def state(company: Sequence[Player]) -> bytes:
        return fingerprint(company, UNOBSERVED)

    def fresh() -> Trial:
        machine.begin()
        world = World(machine, size, scenario, bug)
        return Trial(
            {MAIN: world.main},
            world.judge,
            last=MAIN,
            alone=machine.alone,
            failed=world.failed,
            outcome=world.outcome,
            state=state,
            touched=machine.touched,
        )

    before = logging.root.manager.disable
    logging.disable()  # the handlers of signals warn
    try:
        with machine.installed(), bug.planted() if bug else nullcontext():
            yield fresh
    finally:
        logging.disable(before)
