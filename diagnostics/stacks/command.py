"""`dflash-diag stacks`: what every thread of a process is doing, and who keeps whom waiting."""

import sys

import click

from diagnostics.render import json, text
from diagnostics.stacks import pyspy
from diagnostics.stacks.states import Finding, State, classify
from diagnostics.stacks.threads import Frame
from diagnostics.stacks.verdict import judge
from diagnostics.verdict import EXIT_CODES, Status, Verdict

FOLDED = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/", "/torch/nn/modules/")
FRAMES_SHOWN = 12


@click.command("stacks", epilog=EXIT_CODES)
@click.argument("pid", type=int)
@click.option("--native", is_flag=True, help="C frames as well; stops the process for a moment")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def stacks(pid: int, native: bool, as_json: bool) -> None:
    """Say what every thread of a process is doing, and who keeps whom waiting.

    The process goes on running. Names of threads are those of Python.
    """
    try:
        findings = [classify(thread) for thread in pyspy.dump(pid, native=native)]
    except pyspy.Refused as refusal:
        verdict = Verdict(Status.UNKNOWN, "no-stacks", str(refusal), remedy=refusal.remedy)
        findings = []
    else:
        verdict = judge(findings)
    click.echo((json if as_json else text).render(verdict))
    if not as_json:
        for finding in sorted(findings, key=lambda f: list(State).index(f.state)):
            click.echo("\n" + shown(finding))
    sys.exit(verdict.exit_code)


def shown(finding: Finding) -> str:
    """The thread, its state, and its innermost frames with torch's internals folded."""
    lines, folded = [f"{finding}  [{finding.thread.tid}]"], 0
    for frame in _of_interest(finding):
        if any(part in frame.path for part in FOLDED):
            folded += 1
            continue
        if folded:
            lines.append(f"    ... {folded} frames of torch")
            folded = 0
        lines.append(f"    {frame}")
    return "\n".join(lines + ([f"    ... {folded} frames of torch"] if folded else []))


def _of_interest(finding: Finding) -> list[Frame]:
    """All Python frames, and the native ones above them: where the thread stands."""
    thread = finding.thread
    native = []
    for frame in thread.frames:
        if not frame.is_native:
            break
        if not frame.function.startswith("0x"):
            native.append(frame)
    return [*native[:FRAMES_SHOWN], *thread.python]
