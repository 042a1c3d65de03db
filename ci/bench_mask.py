"""What the block mask costs: its time, and its share of the training step that it is made for.

    python ci/bench_mask.py [--device cuda:0] [--tiny]

Four documents of 3072 tokens with 512 anchors each, Qwen3-8B's drafter. Nothing is asserted.
"""

import argparse

from shapes import QWEN3_8B, TINY


def main() -> None:
    """Measure and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a machine at hand")
    arguments = parser.parse_args()
    import torch
    from clock import median_s, steady_s
    from ours import batch, contender, policy, train_config

    from dflash.attention import tiled_mask

    device = torch.device(arguments.device)
    shape = TINY if arguments.tiny else QWEN3_8B.with_(documents=4)
    layout = policy(shape, train_config()).layout(batch(shape, 0)).to(device)

    def masks() -> None:
        for chunk in layout.chunks:
            tiled_mask(layout.document_T, chunk.anchor_N, shape.block)

    mask_s = median_s(masks, device, repeats=arguments.repeats)
    step_s = steady_s(contender(shape, device).step, device, calls=arguments.repeats)
    print(
        f"{shape.context_tokens} context tokens, {shape.slots} draft slots in {len(layout.chunks)} "
        f"chunk(s): mask {1e3 * mask_s:.2f} ms, step {1e3 * step_s:.1f} ms, share "
        f"{mask_s / step_s:.2%}"
    )


if __name__ == "__main__":
    main()
