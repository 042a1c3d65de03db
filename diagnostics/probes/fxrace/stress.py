"""`--stress`: a realistic load for a while; what fails, hangs or crashes in it is a finding."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diagnostics.probes.fxrace import log
from diagnostics.reproducers import EXIT_CODES, Ended, Outcome, follow, reproducer_dir, said
from diagnostics.verdict import Status, Verdict

QUIET_S = 120.0  # the child says something every few seconds unless a thread holds the GIL
DUMP_S = 20.0
STACK_LINES = 60  # of evidence
CODE = re.compile(r"\bDF\d{3}\b")


class Load:
    """One run of repro/stress.py: what it says, shown as it comes, and how it ended."""

    def __init__(self, arguments: Sequence[str], show: Callable[[str], None]) -> None:
        self._arguments, self._show = arguments, show
        self._plan: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._traces: list[str] = []
        self._stacks = ""

    def run(self) -> Verdict:
        """Run it to its end, or kill it when nothing comes from it any more."""
        ended = follow(
            reproducer_dir() / "stress.py",
            self._arguments,
            self._hear,
            quiet_s=QUIET_S,
            before_killing=self._look,
        )
        return self._judged(ended)

    def _hear(self, line: str) -> None:
        event = said(line)
        if "torch" in event:
            self._plan = event
            self._show(_described(event))
        elif "after_s" in event:
            steps = "  ".join(f"{name} {count}" for name, count in event["steps"].items())
            self._show(f"{event['after_s']:4d} s of {self._plan['seconds']:g}  steps: {steps}")
        elif "failure" in event:
            self._traces.append(event["traceback"] or event["failure"])
            self._show(f"        {event['thread']}, step {event['step']}: {event['failure']}")
        elif "window" in event:
            self._show(f"        trace: {event['window']}")
        elif "outcome" in event:
            self._last = event

    def _look(self, pid: int) -> None:
        """The stacks of a child that says nothing any more, without stopping it."""
        command = [sys.executable, "-m", "py_spy", "dump", "--nonblocking", "--pid", str(pid)]
        try:
            dump = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S)
        except subprocess.TimeoutExpired:
            self._stacks = f"py-spy did not answer within {DUMP_S:g} s"
        else:
            self._stacks = dump.stdout or dump.stderr

    def _judged(self, ended: Ended) -> Verdict:
        torch = f"torch {self._plan.get('torch', 'unknown')}, cure {self._plan.get('cure')}"
        stacks = self._stacks or ended.stderr
        evidence = self._evidence(stacks)
        if ended.code is None:
            return _problem(f"{torch}: the load hangs as a whole", evidence, self._codes(stacks))
        if ended.code not in EXIT_CODES or not self._last:
            if not self._plan:
                summary = f"the load did not start: {ended.how()}"
                return Verdict(Status.UNKNOWN, "load-not-run", summary)
            return _problem(f"{torch}: the load died: {ended.how()}", evidence, self._codes(stacks))
        outcome, reason = Outcome(self._last["outcome"]), self._last["reason"]
        summary = f"{torch}: {reason}; {self._windows()}"
        if outcome is Outcome.ABSENT:
            return Verdict(Status.OK, "load-met-nothing", summary, evidence)
        if outcome is Outcome.CANNOT_TELL:
            return Verdict(Status.UNKNOWN, "load-unclear", summary, evidence)
        hung = stacks if outcome is Outcome.HUNG else ""
        return _problem(summary, evidence, self._codes(hung))

    def _windows(self) -> str:
        count, at_once = self._last["trace_windows"], self._last["threads_tracing_at_once"]
        return f"{count} FX traces, at most {at_once} at once"

    def _codes(self, stacks: str) -> list[str]:
        """The failures that the tracebacks and the stacks show, or that the load itself named."""
        lines = "\n".join([*self._traces, stacks]).splitlines()
        named = {code for line in lines for code in CODE.findall(line)}
        return sorted({*log.classify(enumerate(lines, start=1)).codes, *named})

    def _evidence(self, stacks: str) -> dict[str, str]:
        threads: Mapping[str, Any] = self._last.get("threads", {})
        evidence = {name: _account(one) for name, one in threads.items()}
        if self._last.get("outcome") in (None, Outcome.HUNG):
            evidence["stacks"] = "\n".join(stacks.splitlines()[-STACK_LINES:])
        return evidence


def _described(plan: Mapping[str, Any]) -> str:
    load = f"{plan['target']} in each" if plan["target"] else "compiling, training, recompiling"
    return (
        f"torch {plan['torch']}, {plan['device']}, cure {plan['cure']}: {plan['drafters']} drafter "
        f"threads ({load}) and {plan['targets']} eager target threads for {plan['seconds']:g} s"
    )


def _account(thread: Mapping[str, Any]) -> str:
    failures = ", ".join(f"{count} x {what}" for what, count in thread["failures"].items())
    return f"{thread['steps']} steps; {failures or 'no failure'}"


def _problem(summary: str, evidence: Mapping[str, str], codes: Sequence[str]) -> Verdict:
    modes = " ".join(f"--mode {code}" for code in codes)
    remedy = f"seen here: {', '.join(codes)}; type: dflash-diag fxrace {modes}" if codes else ""
    return Verdict(Status.PROBLEM, "load-failed", summary, evidence, remedy)
