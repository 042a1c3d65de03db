"""DF004: of two overlapping FX traces, one dies of an internal assertion.

What happens: `AssertionError: CURRENT_PATCHER is None in finally block`, out of
`torch.fx.symbolic_trace` or out of a first compile, in a thread that did nothing wrong.

Why: `_new_patcher` (torch/fx/_symbolic_trace.py) keeps the active patcher in one process-wide
variable, saves it on entry and restores it on exit. If A enters, B enters, A leaves, B leaves, then
A's exit reverts B's patches and stores None, and B finds nothing to revert.

When harmless: never. Where the assertion is missing, or caught, `Module.__call__` stays patched
(DF005).

Cure: patcher-isolation, which lets one thread trace at a time, or a lock around every step.

Upstream: pytorch#187589 (not in 2.14); the patcher belongs to the process in 2.9 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import schedules
import torch
import torch.fx


def reproduce(run: harness.Run) -> harness.Finding:
    def trace(inside: Callable[[], None]) -> torch.Tensor:
        return torch.fx.symbolic_trace(run.traced(inside))(torch.zeros(2))

    workers = schedules.overlapping(run, trace, trace)
    errors = {worker.name: harness.described(worker.error) for worker in workers}
    if any(harness.raised_in(worker.error) == "_new_patcher" for worker in workers):
        return harness.judged(True, "a trace died in FX's own bookkeeping", errors=errors)
    if any(errors.values()):
        return harness.Finding("cannot tell", "a trace died of something else", {"errors": errors})
    right = all(torch.equal(worker.value, torch.ones(2)) for worker in workers)
    reason = "both traces gave right graphs" if right else "a trace gave a wrong graph"
    return harness.judged(not right, reason, errors=errors)


if __name__ == "__main__":
    harness.main("DF004", "overlapping-traces", __doc__, reproduce)
