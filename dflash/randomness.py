"""Private generators: every draw is a function of the seed and of what is drawn.

The process-wide generators are never used: torch.compile in one thread saves and restores them, so
that other threads draw the same numbers twice (pytorch#198247).
"""

import numpy as np
import torch

ANCHORS, NOISE = 1, 2


def generator(
    seed: int, purpose: int, epoch: int, batch_index: int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator on `device` for one purpose (ANCHORS, NOISE) in one micro-batch of one epoch."""
    state = np.random.SeedSequence([seed, purpose, epoch, batch_index]).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> 1))
