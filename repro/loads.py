"""What the threads of a stress run do: a compiled drafter that trains, an eager target that checks.

A load is made in its thread and returns its step; a step returns "" or what was wrong with it.
B batch, H heads, S positions, E head size, D = H x E hidden size.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cures import Cure
from torch import nn

Step = Callable[[], str]
Make = Callable[[], Step]

HEADS, HEAD_SIZE = 4, 32
LENGTHS = (128, 256, 384)
STEPS_AT_ONE_LENGTH = 6
TOLERANCE = 2e-3  # of outputs near 1, float32, compiled against eager


def drafter(cure: Cure, device: str, backend: str, seed: int) -> Make:
    """Attention with a causal mask, a gated MLP, AdamW; recompiled for new lengths, and anew.

    On CUDA it is flex_attention, which has no backward on the CPU.
    """
    attend = _flex_attention if device == "cuda" else _dense_attention

    def make() -> Step:
        generator = torch.Generator(device).manual_seed(seed) if cure.private_generator else None
        with torch.random.fork_rng():  # the same weights, whatever the neighbours draw
            block = Block(attend).to(device)
        compiled = _compiled(block, backend)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4)
        done = 0

        def step() -> str:
            nonlocal compiled, done
            if done and done % (STEPS_AT_ONE_LENGTH * len(LENGTHS)) == 0:
                compiled = _compiled(block, backend)
            length = LENGTHS[done // STEPS_AT_ONE_LENGTH % len(LENGTHS)]
            x_BSD = torch.randn(2, length, HEADS * HEAD_SIZE, device=device, generator=generator)
            out_BSD = compiled(x_BSD)
            wrong = _differs(out_BSD, block, x_BSD) if done % STEPS_AT_ONE_LENGTH == 0 else ""
            out_BSD.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            return wrong

        return step

    return make


def _compiled(block: Block, backend: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compiled from nothing, a code object of its own: what DF009 is about is not looked for."""
    forward = harness.own_code(Block.forward)
    return functools.partial(torch.compile(forward, backend=backend, fullgraph=True), block)


class Block(nn.Module):
    """One layer of a drafter."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        hidden = HEADS * HEAD_SIZE
        self.attend = attend
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.gate, self.up = nn.Linear(hidden, 2 * hidden), nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x_BSD).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        out_BHSE = self.attend(*heads.unbind())
        x_BSD = x_BSD + self.out(out_BHSE.transpose(1, 2).flatten(2))
        return x_BSD + self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


def _dense_attention(q_BHSE: Any, k_BHSE: Any, v_BHSE: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True)


def _flex_attention(q_BHSE: Any, k_BHSE: Any, v_BHSE: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q_BHSE, k_BHSE, v_BHSE, score_mod=_causal)


def _causal(score: Any, _b: Any, _h: Any, query: Any, key: Any) -> torch.Tensor:
    return torch.where(query >= key, score, -float("inf"))


def _differs(out_BSD: torch.Tensor, block: Block, x_BSD: torch.Tensor) -> str:
    """Compare with the same weights, eager, with dense attention."""
    with torch.no_grad():
        eager = copy.copy(block)
        eager.attend = _dense_attention
        apart = float((Block.forward(eager, x_BSD) - out_BSD).abs().max())
    return "" if apart < TOLERANCE else f"compiled and eager output differ by {apart:.1e}"


def target(cure: Cure, device: str, seed: int) -> Make:
    """An eager model whose output must not change, and draws that must not repeat."""

    def make() -> Step:
        generator = torch.Generator(device).manual_seed(seed) if cure.private_generator else None
        with torch.random.fork_rng():
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()
        x_BSD = torch.ones(2, 32, 64, device=device)
        drawn: set[int] = set()

        @torch.no_grad()
        def step() -> str:
            out_BSD = model(x_BSD)
            number = int(torch.randint(2**62, (), device=device, generator=generator))
            repeated = number in drawn
            drawn.add(number)
            if not torch.equal(out_BSD, expected_BSD):
                return "the eager model's output changed"
            return "a random number was drawn twice (DF006)" if repeated else ""

        with torch.no_grad():
            expected_BSD = model(x_BSD)
        return step

    return make


def of_user(target: str) -> Make:
    """The user's function, `package.module:function`: a step, or what returns one.

    Called in its thread: whatever is to be compiled there, it compiles on its first call.
    """
    function = find(target)

    def make() -> Step:
        own_step = step_of(function)

        def step() -> str:
            own_step()
            return ""

        return step

    return make


def step_of(function: Callable[[], Any]) -> Callable[[], Any]:
    """What the function returned, if that can be called; else the function itself."""
    returned = function()
    return returned if callable(returned) else function


def find(target: str) -> Callable[[], Any]:
    """Raises SystemExit with what to type when there is no such function."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise SystemExit(f"--target {target}: type package.module:function")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's code lies here
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"--target {target}: {error}; type package.module:function") from error
    if not callable(function):
        raise SystemExit(f"--target {target}: it is a {type(function).__name__}, not a function")
    return function
