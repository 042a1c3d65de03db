"""The DFlash drafter (arXiv 2602.06036), with the weight names of its public checkpoints.

T context tokens, P draft slots, D hidden size, F = captured layers x D, K keys, E head size.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dflash.drafter_config import DrafterConfig
from dflash.layers import EAGER, DraftLayer, HowLayersRun, RMSNorm, Rope


class Drafter(nn.Module):
    """Proposes the B - 1 tokens after an anchor in one pass.

    11 n + 3 weight tensors for n layers; embeddings and lm_head are the target's and not in here.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        captured = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(captured, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs_PD: Tensor,
        features_TF: Tensor,
        document_T: Tensor,
        position_T: Tensor,
        anchor_N: Tensor,
    ) -> Tensor:
        """`context`, then `draft`."""
        context_TD = self.context(features_TF)
        return self.draft(inputs_PD, context_TD, document_T, position_T, anchor_N)

    def context(self, features_TF: Tensor) -> Tensor:
        """What every layer reads of the target's captured hidden states, [T, D]."""
        return self.hidden_norm(self.fc(features_TF))

    def draft(
        self,
        inputs_PD: Tensor,
        context_TD: Tensor,
        document_T: Tensor,
        position_T: Tensor,
        anchor_N: Tensor,
        how: HowLayersRun = EAGER,
    ) -> Tensor:
        """Hidden states of the draft slots after the final norm, [P, D], ready for the lm_head.

        Args:
            inputs_PD: embedded block inputs, block after block.
            context_TD: see `context`.
            document_T: document of each context token. position_T: its position there.
            anchor_N: context index of each block's anchor.
            how: the layers run.
        """
        block = self.config.block_size
        slot_B = torch.arange(block, device=anchor_N.device)
        position_P = (position_T[anchor_N][:, None] + slot_B).flatten()
        rope_KE = Rope.at(torch.cat([position_T, position_P]), self.config, inputs_PD.dtype)
        masks = partial(how.masks, document_T, anchor_N, block)
        return self.through_layers(how.layer, inputs_PD, context_TD, rope_KE, masks)

    def through_layers(
        self,
        run: Callable[..., Tensor],
        hidden_PD: Tensor,
        context_TD: Tensor,
        rope_KE: Rope,
        mask_for: Callable[[int], Any],
    ) -> Tensor:
        """`run` each layer, as `HowLayersRun.layer` is, then the final norm.

        `mask_for` makes the mask of a window, once for all layers that have that.
        """
        windows = [self.config.window(i) for i in range(self.config.num_layers)]
        masks = {window: mask_for(window) for window in set(windows)}
        for layer, window in zip(self.layers, windows, strict=True):
            hidden_PD = run(layer, hidden_PD, context_TD, rope_KE, masks[window])
        return self.norm(hidden_PD)


def build_drafter(
    config: DrafterConfig, *, seed: int, device: torch.device, initializer_range: float = 0.02
) -> Drafter:
    """A drafter whose float32 weights depend on `seed` alone: replicas start bitwise equal.

    The weights are drawn on the CPU from a private generator, so that neither the device nor
    another thread's draws change them.
    """
    drafter = _empty(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, initializer_range, generator=generator)
    return drafter.to(device)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Within, a drafter with float32 weights computes in `dtype`, the target's."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def _empty(config: DrafterConfig) -> Drafter:
    # On the meta device: nn.Linear's own initialisation draws from the process-wide generator.
    with torch.device("meta"):
        drafter = Drafter(config)
    return drafter.to_empty(device="cpu")
