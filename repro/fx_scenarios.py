"""What two threads do while their interleavings are explored, and what is wrong afterwards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch._dynamo.config
import torch.fx
from interleavings import DEADLINE_S, Trial
from torch._higher_order_ops.utils import _set_compilation_env
from turns import Ended, Player, Unclear, Watched, stop_at

Body = Callable[[], str | None]  # says what it did wrong, or None


class Traced(torch.nn.Module):
    """Calls a submodule, so that a trace during which `Module.__call__` is unpatched is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ReLU()

    def forward(self, x: Any) -> Any:
        stop_at("calls its submodule")
        return self.inner(x)


class Scaled(torch.nn.Module):
    """An eager module; the point is before it looks up a parameter (`Module.__getattr__`)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Any) -> Any:
        stop_at("looks up its parameter")
        return x * self.scale


class Shared:
    """All that FX and the eager operators change for the whole process, as it was when made."""

    def __init__(self) -> None:
        # Not the module: a cure may have put another object into sys.modules.
        fx: dict[str, Any] = inspect.unwrap(torch.fx.Tracer.trace).__globals__
        scopes = [fx, vars(math), globals(), *fx["_wrapped_fns_to_patch"].values()]
        self._scopes = [(scope, dict(scope)) for scope in {id(s): s for s in scopes}.values()]
        attributes = [
            *((torch.nn.Module, "__call__"), (torch.nn.Module, "__getattr__")),
            *((torch._dynamo.config, "allow_empty_graphs"),),
            *((torch._dynamo.config, "capture_scalar_outputs"),),
            *fx["_wrapped_methods_to_patch"],
        ]
        self._attributes = [(owner, name, getattr(owner, name)) for owner, name in attributes]

    def changed(self) -> list[str]:
        """The names that do not hold what they held."""
        names = [
            f"{owner.__name__}.{name}"
            for owner, name, old in self._attributes
            if getattr(owner, name) is not old
        ]
        for scope, before in self._scopes:
            keys = sorted(scope.keys() | before)
            names += [key for key in keys if scope.get(key) is not before.get(key)]
        return names

    def restore(self) -> None:
        """Raises `Unclear` if it does not take."""
        for owner, name, old in self._attributes:
            setattr(owner, name, old)
        for scope, before in self._scopes:
            for key in scope.keys() - before:
                del scope[key]
            scope.update(before)
        if changed := self.changed():
            raise Unclear(f"not restored after a schedule: {', '.join(changed)}")


class Ground:
    """What the trials of one exploration share: warm code, and the state each starts from."""

    def __init__(self, watched: Watched) -> None:
        self.x_N = torch.ones(4)
        self.module = Scaled()
        self._backend = harness.CountingBackend()
        self._compiled = torch.compile(lambda x: x.sin() + 1, backend=self._backend)
        self._warm_up()
        # Once more as in a trial: Dynamo looks at the trace functions of such a thread as well.
        player = Player("warm-up", self._warm_up, watched)
        while not player.ended:
            player.go_on(DEADLINE_S)
        if player.ended.error:
            raise player.ended.error
        self._shared = Shared()

    def _warm_up(self) -> None:
        """What compiles or imports for the first time does it before anything is watched."""
        self._compiled(self.x_N)
        for act in (self.call, self.trace, self.call_module, self.operate):
            if wrong := act():
                raise Unclear(f"with no other thread there, a thread {wrong}")

    def trial(self, bodies: Mapping[str, Body]) -> Trial:
        """A fresh start; raises `Unclear` if the process cannot be brought back to it."""
        self._shared.restore()
        if wrong := self._left_behind():
            raise Unclear(f"not restored after a schedule: {wrong}")
        return Trial(bodies, self._judge)

    def call(self) -> str | None:
        """The warm compiled call."""
        return None if self._backend.ran(self._compiled, self.x_N) else "silently ran eager"

    def trace(self) -> str | None:
        """The program's own trace."""
        nodes = torch.fx.symbolic_trace(Traced()).graph.nodes
        right = [("placeholder", "x"), ("call_module", "inner"), ("output", "output")]
        return None if [(n.op, n.target) for n in nodes] == right else "traced a wrong graph"

    def call_module(self) -> str | None:
        """The call of an eager module."""
        stop_at("calls a module")
        same = torch.equal(self.module(self.x_N), self.x_N * 2)
        return None if same else "got a wrong value from a module"

    def operate(self) -> str | None:
        """What every eager higher-order operator enters before it compiles."""
        with _set_compilation_env():
            pass
        return None

    def _judge(self, ended: Mapping[str, Ended]) -> str | None:
        for name, end in ended.items():
            if end.error:
                return f"{name}: {harness.described(end.error)}"
            if end.value:
                return f"{name} {end.value}"
        return self._left_behind()

    def _left_behind(self) -> str | None:
        """What is wrong now that no thread runs."""
        try:
            wrong = self.call()
        except Exception as error:
            return f"afterwards, no trace open: {harness.described(error)}"
        if wrong:
            return f"afterwards a compiled call {wrong}"
        # The call has just shown whether the flag is up; a cure may leave the global to itself.
        if left := [name for name in self._shared.changed() if name != "_is_fx_tracing_flag"]:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            return f"left changed for good: {', '.join(left[:3])}{more}"
        return None


@dataclass(frozen=True)
class Scenario:
    """Two threads, by name what each does; `preemptions` bounds the search (None: all)."""

    roles: Mapping[str, str]
    bodies: Callable[[Ground], Mapping[str, Body]]
    preemptions: int | None = None

    @property
    def alike(self) -> bool:
        """Whether the threads do the same, so that a schedule's mirror image adds nothing."""
        return len(set(self.roles.values())) == 1


_TRACE = "traces with FX"
SCENARIOS = {
    "trace-call": Scenario(
        {"A": _TRACE, "B": "calls a warm compiled function"},
        lambda ground: {"A": ground.trace, "B": ground.call},
    ),
    "trace-trace": Scenario(
        {"A": _TRACE, "B": _TRACE},
        lambda ground: {"A": ground.trace, "B": ground.trace},
        preemptions=2,
    ),
    "trace-module": Scenario(
        {"A": _TRACE, "B": "calls an eager module"},
        lambda ground: {"A": ground.trace, "B": ground.call_module},
    ),
    "trace-op": Scenario(
        {"A": _TRACE, "B": "runs an eager higher-order operator"},
        lambda ground: {"A": ground.trace, "B": ground.operate},
        preemptions=2,
    ),
}
