"""DF006: a compile in one thread makes other threads draw the same random numbers twice.

What happens: nothing visible. Dropout masks, noise or sampled tokens of one thread repeat, because
another thread compiled something in the meantime.

Why: Dynamo saves the state of the default generators before a compile and restores it afterwards
(`preserve_global_state` in torch/_dynamo/convert_frame.py, `preserve_rng_state` in
torch/_dynamo/utils.py), so that compiling draws nothing. The default generators belong to the
whole process: whatever other threads drew in between is rewound, and drawn again.

When harmless: where no other thread draws from a default generator. Not cured by any patch of the
tracing flag, and present in every version measured, on CPU and on CUDA.

Cure: private-generator (a torch.Generator per thread, passed to every draw), or a lock around
every step. Here 64-bit integers are drawn, so that a repeat is never a coincidence.

Upstream: pytorch#198247 (open). Under load, 45-69 % of the draws of other threads were repeats.
"""

from __future__ import annotations

import harness
import schedules
import torch

DRAWS = 64


def reproduce(run: harness.Run) -> harness.Finding:
    generator = torch.Generator().manual_seed(7) if run.cure.private_generator else None

    def draw() -> list[int]:
        return torch.randint(2**62, (DRAWS,), generator=generator).tolist()

    torch.manual_seed(7)
    worker = schedules.beside_compile(run, draw)
    if worker.error:
        reason = f"the draws failed: {harness.described(worker.error)}"
        return harness.Finding("cannot tell", reason)
    beside, after = worker.value, draw()
    repeated = len(set(beside) & set(after))
    evidence = {"draws": 2 * DRAWS, "repeated": repeated, "expected_repeats": 0}
    if repeated:
        reason = f"{repeated} of {DRAWS} numbers drawn beside a compile were drawn again after it"
        return harness.judged(True, reason, **evidence)
    return harness.judged(False, f"{2 * DRAWS} draws, none repeated", **evidence)


if __name__ == "__main__":
    harness.main("DF006", "rng-rewind", __doc__, reproduce)
