"""DF005: overlapping FX traces give a wrong graph, and leave `nn.Module.__call__` patched for good.

What happens: `torch.fx.symbolic_trace` of a model returns without an error a graph in which a
submodule's call is missing, because the call was recorded in another thread's graph; it shows when
the graph is run. Afterwards every eager module in the process is called through a tracer that has
ended.

Why: `Tracer.trace` (torch/fx/_symbolic_trace.py) replaces `torch.nn.Module.__call__` for the whole
process, and the tracer that came last records what the others call. Each trace puts back what it
found: if A enters, B enters, A leaves, B leaves, then A reverts B's patches, which restores A's
own, and nobody takes those away.

When harmless: never. It needs two threads that trace the same modules to be silent; with different
modules A dies of the NameError of DF003, and the patch is left behind all the same.

Cure: patcher-isolation, or a lock around every step.

Upstream: pytorch#187589 (not in 2.14); the patcher belongs to the process in 2.9 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import schedules
import torch
import torch.fx


class TwoLayers(torch.nn.Module):
    """Two layers with a window between them; every instance is made of the same two."""

    def __init__(self, layers: list[torch.nn.Module], between: Callable[[Any], None]) -> None:
        super().__init__()
        self.first, self.second = layers
        self._between = between

    def forward(self, x_BN: Any) -> Any:
        x_BN = self.first(x_BN)
        self._between(x_BN)
        return self.second(x_BN)


def reproduce(run: harness.Run) -> harness.Finding:
    layers: list[torch.nn.Module] = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    x_BN = torch.ones(2, 4)
    expected_BN = layers[1](layers[0](x_BN))
    call, attribute = torch.nn.Module.__call__, torch.nn.Module.__getattr__

    def trace(inside: Callable[[], None]) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(TwoLayers(layers, run.traced(inside)))

    workers = schedules.overlapping(run, trace, trace)
    left_patched = torch.nn.Module.__call__ is not call
    torch.nn.Module.__call__, torch.nn.Module.__getattr__ = call, attribute
    traced = {worker.name: worker.value for worker in workers if worker.value is not None}
    wrong = [name for name in traced if not _is_right(traced[name], x_BN, expected_BN)]
    evidence = {
        "left_patched": left_patched,
        "wrong_graphs": {name: traced[name].code.split("\n") for name in wrong},
        "errors": {worker.name: harness.described(worker.error) for worker in workers},
    }
    if left_patched or wrong:
        reason = f"nn.Module.__call__ left patched: {left_patched}; wrong graphs: {len(wrong)}"
        return harness.judged(True, reason, **evidence)
    if len(traced) < len(workers):
        return harness.Finding("cannot tell", "a trace died, and left nothing behind", evidence)
    return harness.judged(False, "both graphs are right and nothing is left patched", **evidence)


def _is_right(traced: torch.fx.GraphModule, x_BN: torch.Tensor, expected_BN: torch.Tensor) -> bool:
    try:
        return torch.equal(traced(x_BN), expected_BN)
    except Exception:  # whatever a wrong graph fails of
        return False


if __name__ == "__main__":
    harness.main("DF005", "patched-module-call", __doc__, reproduce)
