"""The frozen target: what it computes for the drafter, and the loop that runs it on one device.

R rows (one document each), S tokens of the longest, D hidden size, F = captured layers x D.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from dflash.batches import Batch, TargetFeatures
from dflash.concurrency import Gate
from dflash.data.plan import shares_of
from dflash.drafter_config import are_layers
from dflash.errors import ModelError
from dflash.heartbeat import started, waiting, working
from dflash.routing import RoutedReceiver, RoutedSender
from dflash.streams import Lanes, Ready, own_stream, to_device
from dflash.target_files import load_causal_lm

log = logging.getLogger(__name__)

LAYER_LISTS = ("layers", "h", "blocks")


@dataclass(frozen=True)
class FrozenHead:
    """The target's embeddings and lm_head, which the drafter shares. V vocabulary rows."""

    embedding_VD: Tensor
    head_VD: Tensor

    @property
    def vocab_size(self) -> int:
        """Rows, those that no token uses included."""
        return len(self.head_VD)

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenHead":
        """The same tables on a device; tied tables stay one tensor."""
        embedding_VD = self.embedding_VD.to(device, dtype)
        tied = self.head_VD is self.embedding_VD
        return FrozenHead(embedding_VD, embedding_VD if tied else self.head_VD.to(device, dtype))


class Target:
    """A frozen causal LM of the transformers library, with hooks on the captured layers.

    Not for use by two threads: `copies` gives each its own hooks over shared weights.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.layer_ids = layer_ids
        self.text_config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.layers = _decoder_layers(self.decoder, self.text_config.num_hidden_layers)
        _check_layer_ids(layer_ids, len(self.layers))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def keeps_all_keys(self) -> bool:
        """Whether layers keep keys and values of all tokens, and no other state."""
        if getattr(self.model, "_is_stateful", False):
            return False
        kinds = getattr(self.text_config, "layer_types", None) or ["full_attention"]
        return set(kinds) == {"full_attention"}

    @property
    def has_full_attention(self) -> bool:
        """Whether every layer sees the whole context, and `keeps_all_keys` holds."""
        # A config without layer_types, such as Mistral's or Phi3's, has one window for all layers.
        says_layers = getattr(self.text_config, "layer_types", None)
        window = None if says_layers else getattr(self.text_config, "sliding_window", None)
        return self.keeps_all_keys and not window

    @property
    def head(self) -> FrozenHead:
        """Embeddings and lm_head; raises ModelError for a head that the drafter cannot share."""
        output = self.model.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise ModelError(
                "the target's lm_head has a bias, which DFlash checkpoints cannot hold"
            )
        embedding_VD = self.model.get_input_embeddings().weight.detach()
        tied = output.weight is self.model.get_input_embeddings().weight
        return FrozenHead(embedding_VD, embedding_VD if tied else output.weight.detach())

    def copies(self, devices: list[torch.device]) -> list["Target"]:
        """One target per device. Weights are copied once per device and shared on the same one."""
        moved: dict[torch.device, dict[int, Any]] = {d: {} for d in devices}
        for device, memo in moved.items():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                memo[id(tensor)] = _on(tensor, device)
        models = [copy.deepcopy(self.model, dict(moved[device])) for device in devices]
        return [Target(model, self.layer_ids) for model in models]

    def features(self, batch: Batch, *, soft_labels: bool) -> TargetFeatures:
        """What the drafter needs of a batch: see `hidden`."""
        if batch.is_empty:
            return TargetFeatures(batch, None, None)
        hidden = self.hidden(batch.tokens_T, batch.lengths, final=soft_labels)
        return TargetFeatures(batch, *hidden, Ready.after(self.device))

    @torch.no_grad()
    def hidden(
        self, tokens_T: Tensor, lengths: Sequence[int], *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Captured hidden states [T, F] of documents laid end to end and, if `final`, the last
        ones after the final norm [T, D].

        The target runs over one row per document, padded on the right. A causal model never looks
        right, so that padding changes nothing and documents cannot leak into each other, whether a
        layer mixes tokens by attention or by a recurrent state. Documents that ascend in length
        share a pass. The lm_head is skipped and, unless `final`, so is every layer above the last
        captured one.
        """
        shares = shares_of(lengths)
        tokens = tokens_T.split([sum(share) for share in shares])
        parts = [self._pass(*one, final=final) for one in zip(tokens, shares, strict=True)]
        features, lasts = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(lasts) if final else None

    def _pass(
        self, tokens_T: Tensor, lengths: Sequence[int], *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens_RS = pad_sequence(list(tokens_T.split(tuple(lengths))), batch_first=True)
        where_T = to_device(_places(lengths, tokens_RS.shape[1]), self.device)
        tokens_RS = to_device(tokens_RS, self.device)
        last_RSD = None
        with self.capturing(stop_early=not final) as captured, suppress(_AllCaptured):
            last_RSD = self.decoder(input_ids=tokens_RS, use_cache=False).last_hidden_state
        features_TF = torch.cat([_at(where_T, hidden_RSD) for hidden_RSD in captured], dim=-1)
        return features_TF, None if last_RSD is None else _at(where_T, last_RSD)

    @contextmanager
    def capturing(self, *, stop_early: bool = False) -> Iterator[list[Tensor]]:
        """Within, a forward pass of the model appends the captured layers' outputs, in order.

        Hooks rather than output_hidden_states: they keep what is needed only, and the last layer's
        output before the final norm.
        """
        captured: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            captured.append(output[0] if isinstance(output, tuple) else output)
            if stop_early and len(captured) == len(self.layer_ids):
                raise _AllCaptured

        handles = [self.layers[i].register_forward_hook(keep) for i in self.layer_ids]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


class _AllCaptured(BaseException):
    """Leaves a forward pass early; a BaseException, so that no `except Exception` eats it."""


def load_target(
    path: str,
    layer_ids: tuple[int, ...],
    dtype: torch.dtype,
    *,
    trust_remote_code: bool,
) -> Target:
    """Load a causal LM, with hooks on the captured layers: see `load_causal_lm`."""
    return Target(load_causal_lm(path, dtype, trust_remote_code=trust_remote_code), layer_ids)


def load_targets(
    path: str,
    layer_ids: tuple[int, ...],
    dtype: torch.dtype,
    devices: list[torch.device],
    *,
    trust_remote_code: bool,
) -> list[Target]:
    """Load once, then one target per device."""
    log.info("loading the target %s", path)
    started_s = time.monotonic()
    target = load_target(path, layer_ids, dtype, trust_remote_code=trust_remote_code)
    copies = target.copies(devices)
    names = ", ".join(dict.fromkeys(map(str, devices)))
    log.info("target ready on %s in %.1f s", names, time.monotonic() - started_s)
    return copies


def run_target(
    target: Target,
    batches: RoutedReceiver[Batch],
    features: RoutedSender[TargetFeatures],
    indices: Iterator[int],
    get_ready: Callable[[], None],
    gate: Gate,
    soft_labels: bool,
    drafters: Sequence[torch.device],
) -> None:
    """TargetForwardLoop: batches in, features out to the drafter whose turn it is.

    `get_ready` compiles and arrives at the gate. The copy to a drafter's device begins here, so
    that it runs beside the work of both.
    """
    lanes = Lanes()
    with batches, features, own_stream(target.device):
        get_ready()
        waiting("the start-up gate")
        gate.wait()
        started()
        for index in indices:
            batch = batches.receive(index)
            working(f"forward of batch {index}")
            made = target.features(batch, soft_labels=soft_labels)
            features.send(index, made.sent_to(drafters[index % len(drafters)], lanes))


def _places(lengths: Sequence[int], width: int) -> Tensor:
    """Where each token of documents laid end to end is in rows of that width, one per document."""
    places = [torch.arange(length) + row * width for row, length in enumerate(lengths)]
    return torch.cat(places)


def _at(where_T: Tensor, hidden_RSD: Tensor) -> Tensor:
    return hidden_RSD.flatten(0, 1)[where_T]


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for name, module in decoder.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == count
        if is_list and name.split(".")[-1] in LAYER_LISTS:
            return module
    raise ModelError(
        f"{type(decoder).__name__}: found no list of {count} decoder layers to capture from",
        remedy="open an issue with the model's config.json",
    )


def _check_layer_ids(layer_ids: tuple[int, ...], count: int) -> None:
    if not layer_ids or not are_layers(layer_ids, count):
        raise ModelError(
            f"--target-layer-ids {','.join(map(str, layer_ids))}: must be increasing layer numbers "
            f"of the target, 0 to {count - 1}",
            remedy="name the layers to capture with --target-layer-ids",
        )
