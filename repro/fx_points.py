"""Where torch touches the state that FX traces share: the points at which threads are interleaved.

A line is found by the names that its bytecode uses, in the function that torch, or a cure, has in
place when it is looked for. So this holds for code that a cure transplanted, and for torch versions
whose lines lie elsewhere. A function or a name that this torch lacks gives no point.
"""

from __future__ import annotations

import dis
import functools
import importlib
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

FX = "torch.fx._symbolic_trace"


class Access(NamedTuple):
    """Lines of a function that use all of `names`, and what they do, in the order of the lines.

    A line that stores the last name takes its label from `writes`, any other from `reads`; if there
    are more lines than labels, the last label serves for the rest.
    """

    module: str
    function: str
    names: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_FLAG = ("_is_fx_tracing_flag",)
_PATCHER = ("CURRENT_PATCHER",)
# What dflash.fx_isolation puts in the place of the two.
_OWN_FLAG = ("_dflash_local", "tracing")
_OWN_PATCHER = ("_dflash_local", "patcher")
_OPERATORS = "torch._higher_order_ops.utils"

ACCESSES = (
    Access(
        *(FX, "Tracer.trace", _FLAG),
        reads=("saves the tracing flag",),
        writes=("sets the tracing flag", "restores the tracing flag"),
    ),
    Access(
        *(FX, "Tracer.trace", _OWN_FLAG),
        reads=("saves its thread's flag",),
        writes=("sets its thread's flag", "restores its thread's flag"),
    ),
    Access(FX, "is_fx_symbolic_tracing", _FLAG, reads=("reads the tracing flag",)),
    Access(FX, "is_fx_symbolic_tracing", _OWN_FLAG, reads=("reads its thread's flag",)),
    # The flag of torch 2.14 is a thread's own.
    Access(
        *(FX, "_get_is_fx_tracing", ("_is_fx_tracing_tls",)),
        reads=("reads its thread's flag",),
    ),
    Access(
        *(FX, "_set_is_fx_tracing", ("_is_fx_tracing_tls", "flag")),
        writes=("sets its thread's flag to {value}",),
    ),
    Access(
        *(_OPERATORS, "_set_compilation_env", _FLAG),
        reads=("saves the tracing flag",),
        writes=("clears the tracing flag", "restores the tracing flag"),
    ),
    Access(
        *(FX, "_new_patcher", _PATCHER),
        reads=("saves the patcher", "takes the patcher", "looks for the patcher"),
        writes=("sets the patcher", "restores the patcher"),
    ),
    Access(
        *(FX, "_new_patcher", _OWN_PATCHER),
        reads=("saves its thread's patcher",),
        writes=("sets its thread's patcher", "restores its thread's patcher"),
    ),
    Access(FX, "_Patcher.patch_method", ("cls", "getattr"), reads=("saves {cls.__name__}.{name}",)),
    Access(
        *(FX, "_PatchedFnSetAttr.patch", ("setattr",)),
        reads=("patches {self.frame_dict.__name__}.{self.fn_name}",),
    ),
    Access(
        *(FX, "_PatchedFnSetAttr.revert", ("setattr",)),
        reads=("reverts {self.frame_dict.__name__}.{self.fn_name}",),
    ),
    # The trace is over, but modules are made and looked into, perhaps while another one is open.
    Access(FX, "symbolic_trace", ("_make_graph_module",), reads=("makes the graph's module",)),
)


def watched() -> dict[CodeType, dict[int, str]]:
    """Code -> line -> label, of the functions as they are now: look again after a cure."""
    points: dict[CodeType, dict[int, str]] = {}
    for access in ACCESSES:
        for code in _codes(access):
            if lines := _labelled(code, access):
                points.setdefault(code, {}).update(lines)
    return points


def _codes(access: Access) -> Iterator[CodeType]:
    """The function's code, and that of each function it wraps."""
    try:
        module: Any = importlib.import_module(access.module)
        function = functools.reduce(getattr, access.function.split("."), module)
    except (ImportError, AttributeError):
        return
    while function is not None:
        if code := getattr(function, "__code__", None):
            yield code
        function = getattr(function, "__wrapped__", None)


def _labelled(code: CodeType, access: Access) -> dict[int, str]:
    used = _used_names(code)
    lines = sorted(line for line, names in used.items() if names.keys() >= set(access.names))
    labels = {True: list(access.writes), False: list(access.reads)}
    labelled: dict[int, str] = {}
    for line in lines:
        rest = labels[used[line][access.names[-1]]]
        labelled[line] = rest.pop(0) if len(rest) > 1 else rest[0]
    return labelled


def _used_names(code: CodeType) -> dict[int, dict[object, bool]]:
    """Line -> the names it loads or stores -> whether it stores them."""
    used: dict[int, dict[object, bool]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions else None
        if line is None or instruction.opname == "LOAD_CONST":
            continue
        names, argument = used.setdefault(line, {}), instruction.argval
        # From Python 3.13 on, one instruction may load two names.
        for name in argument if isinstance(argument, tuple) else (argument,):
            names[name] = names.get(name, False) or instruction.opname.startswith("STORE_")
    return used
