"""What a look at a process saw besides its verdict: lines for people, data for scripts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from diagnostics.stacks import tree
from diagnostics.stacks.states import Finding
from diagnostics.stacks.threads import Frame
from diagnostics.stacks.tree import Waited
from diagnostics.stacks.verdict import by_guilt
from diagnostics.verdict import Verdict

FOLDED = ("/torch/", "/threading.py", "/dflash/concurrency/", "/concurrent/futures/")
NATIVE_SHOWN = 12


@dataclass(frozen=True)
class Stack:
    """A thread, what it does, and its frames, the innermost first and those of libraries folded."""

    thread: str
    does: str
    tid: int
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """Lines of another kind under a heading: the loops, the last events, the process's own dump."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class StacksVerdict(Verdict):
    """A verdict with all that was seen: who waits for whom, and the stacks, most telling first."""

    sections: tuple[Section, ...] = ()
    waits: tuple[Waited, ...] = ()
    stacks: tuple[Stack, ...] = ()


def with_details(
    verdict: Verdict,
    findings: Sequence[Finding] = (),
    sections: Iterable[Section] = (),
    first: Sequence[str] = (),
) -> StacksVerdict:
    """The verdict and what was seen; the stacks of the threads named `first` come first."""
    guilty = sorted(by_guilt(findings), key=lambda f: str(f.thread) not in first)
    return StacksVerdict(
        verdict.status,
        verdict.code,
        verdict.summary,
        verdict.evidence,
        verdict.remedy,
        tuple(sections),
        tuple(tree.of(findings)),
        tuple(_stack(finding) for finding in guilty if finding.thread.frames),
    )


def render(verdict: StacksVerdict) -> Iterator[str]:
    """The lines below a verdict."""
    for section in verdict.sections:
        yield from ("", section.title, *section.lines)
    if verdict.waits:
        yield from ("", "who waits for whom", *tree.render(verdict.waits))
    if verdict.stacks:
        yield from ("", "stacks, most telling first")
    for stack in verdict.stacks:
        yield f"  {stack.thread} {stack.does}  [{stack.tid}]"
        yield from (f"      {frame}" for frame in stack.frames)


def _stack(finding: Finding) -> Stack:
    thread = finding.thread
    return Stack(str(thread), finding.said, thread.tid, tuple(_folded(_of_interest(finding))))


def _folded(frames: list[Frame]) -> Iterator[str]:
    """The frames, runs of library code as one line, but for the innermost."""
    hidden = 0
    for i, frame in enumerate(frames):
        if i and any(part in frame.path for part in FOLDED):
            hidden += 1
            continue
        if hidden:
            yield f"... {hidden} of the library"
            hidden = 0
        yield str(frame)
    if hidden:
        yield f"... {hidden} of the library"


def _of_interest(finding: Finding) -> list[Frame]:
    """All Python frames, and the native ones above them: where the thread stands."""
    native = []
    for frame in finding.thread.frames:
        if not frame.is_native:
            break
        if not frame.function.startswith("0x"):
            native.append(frame)
    return [*native[:NATIVE_SHOWN], *finding.thread.python]
