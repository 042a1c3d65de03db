"""DF007: what a thread sets while another one compiles is silently undone.

What happens: a thread calls `torch.set_default_dtype` or `torch.use_deterministic_algorithms`, and
a moment later the old setting is back.

Why: Dynamo saves these settings before a compile and puts them back afterwards
(`preserve_global_state` in torch/_dynamo/convert_frame.py), so that compiling changes nothing. They
belong to the process, so a change that another thread makes in between is put back as well.

When harmless: where such settings are made once, before any thread compiles.

Cure: settings-first (make them before the first thread starts), or a lock around every step.

Upstream: the same save and restore as DF006, pytorch#198247 (open).
"""

from __future__ import annotations

import harness
import schedules
import torch


def reproduce(run: harness.Run) -> harness.Finding:
    def settle() -> None:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)

    def act() -> dict[str, str]:
        if not run.cure.settles_first:
            settle()
        return settings()

    before = settings()
    if run.cure.settles_first:
        settle()
    worker = schedules.beside_compile(run, act)
    after = settings()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    evidence = {"before": before, "set": worker.value, "after": after}
    if worker.error:
        reason = f"the thread failed: {harness.described(worker.error)}"
        return harness.Finding("cannot tell", reason, evidence)
    undone = [name for name in after if after[name] != worker.value[name]]
    reason = f"undone by another thread's compile: {', '.join(undone) or 'nothing'}"
    return harness.judged(bool(undone), reason, **evidence)


def settings() -> dict[str, str]:
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }


if __name__ == "__main__":
    harness.main("DF007", "global-settings", __doc__, reproduce)
