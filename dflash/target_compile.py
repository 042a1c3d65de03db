"""A target's layers, compiled by its own thread: one graph for all of them, whatever the sizes are.

Sizes are dynamic: what a target runs at once is a share of a micro-batch (`dflash.data.plan`), as
many rows as documents, each as long as the longest. There are two kinds only, of several documents
and of one.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from dflash.compile import Seal, compiled_for_this_thread
from dflash.target import Target

log = logging.getLogger(__name__)
KINDS = (2, 1)
"""Documents of the shares to compile for: for torch, 2 stands for all that are more."""


def compile_layers(
    target: Target,
    backend: str,
    *,
    longest: int,
    allow_late: bool,
    phase: Callable[[str], None],
) -> None:
    """From now on the target's layers run compiled, where that can be; else the log says why not.

    A kind of share that was not foreseen takes the layers back to running as they are, unless
    `allow_late`. Compiles for the calling thread, on its stream.

    Args:
        longest: tokens of a document to compile with.
        phase: is told what goes on.
    """
    if not target.keeps_all_keys:
        log.info("the target's layers are not compiled: they keep more than keys and values")
        return

    def give_up(what: str) -> None:
        log.warning("%s: the target's layers run as they are from here on", what)
        _uncompile(target)

    seal = Seal(allow_late=allow_late, instead=give_up)
    compiled = compiled_for_this_thread(_run, seal.backend(backend), dynamic=True)
    for layer in target.layers:
        layer.forward = partial(compiled, layer)
    # Odd, unlike any size of the model: torch takes sizes that are equal here to be so always.
    length = longest - 1 + longest % 2
    started_s = time.monotonic()
    for documents in KINDS:
        phase(f"compiling the target's layers for {documents} document(s)")
        lengths = [length] * documents
        try:
            target.hidden(torch.zeros(sum(lengths)).long(), lengths, final=True)
        except TorchDynamoException as error:
            _uncompile(target)
            why = " ".join(str(error).split("\n\n")[0].split())
            log.warning("the target's layers cannot be compiled, and run as they are: %s", why)
            return
    seal.close()
    log.info("compiled the target's layers in %.1f s", time.monotonic() - started_s)


def _run(layer: nn.Module, *args: Any, **named: Any) -> Any:
    return type(layer).forward(layer, *args, **named)


def _uncompile(target: Target) -> None:
    for layer in target.layers:
        layer.__dict__.pop("forward", None)
