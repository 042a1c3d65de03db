"""CUDA graphs of the drafter's passes: captured once for each size, then replayed.

Each drafter thread captures for itself, on its own stream and into a memory pool of its own, in the
capture mode that lets other threads go on. torch's own cudagraph trees do not work in several
threads (DF013 in docs/fxrace.md). Meanwhile nobody may draw from a device's default random
generator, no collective may run, and nobody may wait for a whole device, as Inductor does when it
tries kernels: capturing comes after everyone has compiled, and before the gate.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from dflash.layout import Chunk, Layout
from dflash.passes import EagerPasses

T = TypeVar("T")
_one_captures = threading.Lock()


@contextmanager
def capturing() -> Iterator[None]:
    """Within, this thread alone captures, tries and drops graphs, and no garbage is collected.

    There may be a graph in a cycle of objects, and to destroy one beside a capture can spoil it.
    torch.cuda.graph collects beforehand; but another thread could start a collection meanwhile.
    """
    with _one_captures:
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


class GraphedPasses:
    """`EagerPasses` of one size as replays; inputs are copied to where the graphs read them.

    The graphs of all sizes may share a pool: a micro-batch leaves nothing in it that the next one
    needs.
    """

    def __init__(self, passes: EagerPasses, features_TF: Tensor, layout: Layout, pool: Any) -> None:
        """Capture, within `capturing`, on the calling thread's stream, not the default one.

        Args:
            features_TF, layout: of the sizes to capture for; what they hold does not matter.
            pool: of torch.cuda.graph_pool_handle().
        """
        self.features_TF, self.layout, self.pool = features_TF.clone(), layout.clone(), pool
        (self.chunk,) = self.layout.chunks
        self.sums = passes.sums
        self._begin, _ = self._captured(lambda: passes.begin(self.features_TF, self.layout))
        self._draft, self.hidden_PD = self._captured(lambda: passes.draft(self.chunk))
        self.main_PD = torch.zeros_like(self.hidden_PD)
        self.cap_PD = torch.zeros_like(self.hidden_PD) if self.sums.with_cap else None
        self._backward, self.weights = self._captured(
            lambda: passes.weights_and_leaf(self.main_PD, self.cap_PD)
        )
        self._end, self.weights_of_context = self._captured(passes.weights_of_context)
        passes.forget()  # so that graphs of other sizes find room in the pool

    def fits(self, layout: Layout) -> bool:
        """Whether these are the sizes that were captured; the context's are."""
        blocks = len(self.chunk.anchor_N)
        return all(len(chunk.anchor_N) == blocks for chunk in layout.chunks)

    def begin(self, features_TF: Tensor, layout: Layout) -> None:
        """See `Passes`."""
        self.sums.before_overwriting()
        self.features_TF.copy_(features_TF)
        self.layout.document_T.copy_(layout.document_T)
        self.layout.position_T.copy_(layout.position_T)
        self._begin.replay()

    def draft(self, chunk: Chunk) -> Tensor:
        """See `Passes`. The result is overwritten by the next one."""
        # What this keeps for its backward lies where that one will leave gradients.
        self.sums.before_overwriting()
        self.chunk.anchor_N.copy_(chunk.anchor_N)
        self.chunk.inputs_NB.copy_(chunk.inputs_NB)
        self._draft.replay()
        return self.hidden_PD

    def backward(self, main_PD: Tensor, cap_PD: Tensor | None) -> None:
        """See `Passes`."""
        self.main_PD.copy_(main_PD)
        if self.cap_PD is not None and cap_PD is not None:
            self.cap_PD.copy_(cap_PD)
        self._backward.replay()
        self.sums.add(self.weights)

    def end(self) -> None:
        """See `Passes`."""
        self._end.replay()
        self.sums.add(self.weights_of_context)

    def _captured(self, act: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        try:
            made = act()
        except BaseException:
            with suppress(RuntimeError):  # about the capture that `act` has spoilt
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, made
