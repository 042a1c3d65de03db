"""The loss alone, in time and memory, against the bare matrix products that it needs.

    python ci/bench_loss.py [--device cuda:0] [--tiny]

32768 draft slots, hidden size 5120, vocabulary 248320; with and without soft labels and CAP. The
products: logits of the slots that have a loss, their gradient taken to the hidden states (twice
with CAP), and the logits of the target's rows that are asked for. Nothing is asserted.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from shapes import QWEN36_27B, TINY, Shape

if TYPE_CHECKING:
    import torch

LARGE_CHUNK = 2048


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a machine at hand")
    arguments = parser.parse_args()
    import torch

    shape = TINY if arguments.tiny else QWEN36_27B.with_(documents=2)
    work = Work(shape, torch.device(arguments.device))
    print(
        f"{shape.slots} slots, {shape.context_tokens} context tokens, hidden {shape.hidden}, "
        f"vocabulary {shape.vocabulary}; products of {LARGE_CHUNK} rows at once\n"
        f"{'':20}{'loss ms':>9}{'added GB':>10}{'products ms':>13}{'ratio':>7}"
    )
    for soft in (False, True):
        for cap in (False, True):
            name = "CE" + " + KL" * soft + " + CAP" * cap
            loss = work.loss(soft, 0.1 if cap else 0.0)
            taken_ms, added_gb = work.ms(loss, arguments.repeats), work.added_gb(loss)
            bare_ms = work.ms(work.products(soft, cap), arguments.repeats)
            print(
                f"{name:20}{taken_ms:9.2f}{added_gb:10.3f}{bare_ms:13.2f}{taken_ms / bare_ms:7.2f}",
                flush=True,
            )


class Work:
    """The tensors of one micro-batch's loss, and what is done with them."""

    def __init__(self, shape: Shape, device: "torch.device") -> None:
        import torch
        from clock import working_dtype
        from ours import batch, random_head

        from dflash.asked import AskedSlots

        self.device, dtype = device, working_dtype(device)
        self.asked = AskedSlots.of(batch(shape, 0).blocks).to(device)
        self.head_VD = random_head(shape, device).head_VD
        sizes = (shape.slots, shape.hidden), (shape.context_tokens, shape.hidden)
        self.hidden_PD, self.teacher_TD = (
            torch.randn(size, device=device, dtype=dtype) for size in sizes
        )
        self.losses = None
        if device.type == "cuda":
            from dflash.loss_kernel import chunk_losses

            self.losses = chunk_losses

    def loss(self, soft_labels: bool, cap_lambda: float) -> Callable[[], object]:
        """Loss and its gradient with respect to the hidden states, as the product makes them."""
        from dflash.losses import Objective, block_losses

        objective = Objective(0.15, 2.0, cap_lambda)
        teacher_TD = self.teacher_TD if soft_labels else None
        return lambda: block_losses(
            self.hidden_PD, self.head_VD, self.asked, objective, teacher_TD, self.losses
        )

    def products(self, soft_labels: bool, cap: bool) -> Callable[[], None]:
        """The matrix products that the loss cannot do without, and nothing else."""
        asked_SD = self.hidden_PD[self.asked.slot_S]
        rows_UD = self.teacher_TD[self.asked.row_U] if soft_labels else self.teacher_TD[:0]

        def work() -> None:
            for hidden_CD in asked_SD.split(LARGE_CHUNK):
                logits_CV = hidden_CD @ self.head_VD.T
                for _ in range(1 + cap):
                    logits_CV @ self.head_VD
            for hidden_CD in rows_UD.split(LARGE_CHUNK):
                hidden_CD @ self.head_VD.T

        return work

    def ms(self, work: Callable[[], object], repeats: int) -> float:
        """Median milliseconds."""
        from clock import median_s

        return 1e3 * median_s(work, self.device, repeats=repeats, warm_up=1)

    def added_gb(self, work: Callable[[], object]) -> float:
        """How far the peak of the memory rises meanwhile."""
        from clock import Peak

        peak = Peak(self.device)
        work()
        return peak.added_gb


if __name__ == "__main__":
    main()
