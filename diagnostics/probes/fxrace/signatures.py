"""What each failure looks like in a log, told by the place that raised and not by the words alone.

Where only the words are left, because a program logs `str(error)`, a sighting is not certain.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from diagnostics.probes.fxrace.stacks import COLOUR, Dump, Frame, Line, Traceback

EVAL_FRAME = "torch/_dynamo/eval_frame.py"
SYMBOLIC_TRACE = "torch/fx/_symbolic_trace.py"
PROXY_TENSOR = "torch/fx/experimental/proxy_tensor.py"
CUDAGRAPH_TREES = "torch/_inductor/cudagraph_trees.py"
COMPILE_FX = "torch/_inductor/compile_fx.py"
RUNTIME_WRAPPERS = "torch/_functorch/_aot_autograd/runtime_wrappers.py"


@dataclass(frozen=True)
class Sighting:
    """One occurrence: on which line of the log, what was seen there, and whether it is certain.

    `code` is empty for a look-alike, and `seen` then says why it is not the race.
    """

    code: str
    line: int
    seen: str
    certain: bool = True


@dataclass(frozen=True)
class Signature:
    """An exception: its type, its words, the functions that raise it (none: any place).

    `sure`: whether that place can only be reached through another thread. `traced`: whether a trace
    in the very same stack explains it without any other thread.
    """

    code: str
    error: str
    words: str = ""
    file: str = ""
    functions: tuple[str, ...] = ()
    sure: bool = True
    traced: bool = False


SIGNATURES = (
    # Older releases raise it in _fn.
    Signature(
        "DF001",
        "RuntimeError",
        "Detected that you are using FX to symbolically trace",
        EVAL_FRAME,
        ("compile_wrapper", "_fn"),
        traced=True,
    ),
    Signature(
        "DF003",
        "NameError",
        "module is not installed as a submodule",
        SYMBOLIC_TRACE,
        ("path_of_module",),
        traced=True,
    ),
    Signature("DF004", "AssertionError", "CURRENT_PATCHER", SYMBOLIC_TRACE, ("_new_patcher",)),
    Signature("DF009", "FailOnRecompileLimitHit", sure=False),
    # A bare assert, without words.
    Signature("DF013", "AssertionError", "", CUDAGRAPH_TREES, ("get_obj",)),
    Signature("DF013", "RuntimeError", "Offset increment outside graph capture"),
    # One thread that holds on to an output, or copies during its own capture, gets these as well.
    Signature(
        "DF013", "RuntimeError", "output of CUDAGraphs that has been overwritten", sure=False
    ),
    Signature("DF013", "Error", "operation not permitted when stream is capturing", sure=False),
)
ALONE = " (one thread alone can get there as well)"
# What says enough without a stack. The recompile limit is a warning, which never has one.
LIMIT = re.compile(r"torch\._dynamo hit config\.\w+ \(\d+\)")
WORDS = {s.words: s.code for s in SIGNATURES if s.words}


def sightings(event: Traceback | Dump | Line) -> Iterator[Sighting]:
    """What one stack, dump or line of a log shows."""
    match event:
        case Traceback():
            yield from _in_traceback(event)
        case Dump():
            yield from _in_dump(event)
        case Line():
            yield from _in_line(event)


def _in_traceback(event: Traceback) -> Iterator[Sighting]:
    for signature in SIGNATURES:
        if event.error.endswith(signature.error) and _says(event.message, signature):
            places = event.frames if event.mixed else event.frames[-1:]
            raised = [f for f in places if f.within(signature.file, *signature.functions)]
            if raised or not signature.file:
                yield _judged(signature, event, raised)
                return
    if event.mixed or _own_trace(event.frames):
        return
    borrowed = [f for f in event.frames if f.within(SYMBOLIC_TRACE, "module_call_wrapper")]
    if borrowed:
        seen = f"{borrowed[0]}, and no trace in that stack; {_said(event)}"
        yield Sighting("DF005", event.line, seen, certain=False)
    else:  # raised anew by somebody else, who kept the words
        yield from _in_line(Line(_said(event), event.line))


def _says(message: str, signature: Signature) -> bool:
    cut_off = bool(signature.file) and signature.words.startswith(message)
    return signature.words in message or cut_off


def _judged(signature: Signature, event: Traceback, raised: list[Frame]) -> Sighting:
    where = f"{raised[-1]}; " if raised else ""
    trace = _own_trace(event.frames) if signature.traced else None
    if trace and not event.mixed:
        seen = f"a trace in the same stack explains it ({trace}): {where}{_said(event)}"
        return Sighting("", event.line, seen)
    seen = where + _said(event) + ("" if signature.sure else ALONE)
    return Sighting(signature.code, event.line, seen, signature.sure and not event.mixed)


def _own_trace(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame of a trace that the thread opened itself."""
    traces = (
        f for f in frames if f.within(SYMBOLIC_TRACE, "trace") or f.within(PROXY_TENSOR, "trace")
    )
    return next(traces, None)


def _said(event: Traceback) -> str:
    return f"{event.error}: {event.message}" if event.message else event.error


def _in_dump(event: Dump) -> Iterator[Sighting]:
    """A lazy backward compile that waits, and who keeps it waiting."""
    lazy = [
        thread for thread in event.threads if _within(thread, COMPILE_FX, "compile_fx_backward")
    ]
    waiting = [thread for thread in lazy if _python(thread)[0].function == "compile_fx_backward"]
    holders = [
        thread
        for thread in event.threads
        if any(f.function == "create_fw_bw_graph" for f in thread)
        and _within(thread, "torch/autograd/__init__.py", "grad")
    ]
    if waiting and holders:
        seen = "one thread waits in compile_fx_backward, another in autograd.grad under "
        yield Sighting("DF012", event.line, seen + "create_fw_bw_graph")
    elif len(lazy) > 1:
        seen = f"{len(lazy)} threads are in compile_fx_backward at the same moment"
        yield Sighting("DF010", event.line, seen, certain=False)


def _within(thread: tuple[Frame, ...], file: str, function: str) -> bool:
    return any(frame.within(file, function) for frame in thread)


def _python(thread: tuple[Frame, ...]) -> list[Frame]:
    """Without native frames, and without the lines that only wait."""
    return [frame for frame in thread if ".py" in frame.path]


def _in_line(event: Line) -> Iterator[Sighting]:
    if "hit config." in event.text and (limit := LIMIT.search(event.text)):
        yield Sighting("DF009", event.line, limit[0] + ALONE, certain=False)
        return
    for words, code in WORDS.items():
        if words in event.text and "raise " not in event.text:  # source code is no error
            piece = next(p for p in re.split("[\r\n]", event.text) if words in p)
            said = COLOUR.sub("", piece).strip()
            yield Sighting(code, event.line, f"only the words: {said}", certain=False)
            return
