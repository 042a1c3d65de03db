"""Who is to blame: the sentence above the stacks.

Who owns a lock, or who should have brought an item, stands nowhere: what is concluded from the
other threads is called a suspicion. A process in which some thread goes on is not called stuck,
unless a loop of the trainer is past its limit.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from diagnostics.stacks.states import LAZY_BACKWARD, Finding, State
from diagnostics.verdict import Status, Verdict

SUSPICION = "(suspicion)"
TQDM = "tqdm/_monitor.py"
# Why threads wait for each other, most telling first: code, and how the sentence goes on.
WAITS = {
    State.MUTEX: ("native-mutex", "hold mutexes of C code in a circle"),
    State.QUEUE_FULL: ("queue-full", "nobody is left who takes items out"),
    State.QUEUE_EMPTY: ("queue-empty", "nobody is left who brings one"),
    State.QUEUE_JOIN: ("queue-join", "nobody is left who calls task_done"),
    State.BARRIER: ("barrier-party-missing", "the missing parties will not come"),
    State.SEMAPHORE: ("semaphore", "nobody is left who releases it"),
    State.EVENT: ("event-never-set", "nobody is left who sets it"),
    State.CONDITION: ("condition-never-notified", "nobody is left who notifies it"),
}
OUTSIDE = {
    State.WRITES: ("pipe-full", Status.PROBLEM, "whoever should read the other end does not"),
    State.CHILD: ("awaits-child", Status.UNKNOWN, "look at the child process"),
    State.READS: ("awaits-input", Status.UNKNOWN, "whether any will come cannot be told from here"),
    State.POLLS: ("awaits-input", Status.UNKNOWN, "whether any will come cannot be told from here"),
}
DEVICE = (State.AWAITS_DEVICE, State.AWAITS_EVENT, State.AWAITS_STREAM, State.AWAITS_NCCL)


def judge(findings: Sequence[Finding]) -> Verdict:
    """One verdict over all threads of a process."""
    evidence = {str(f.thread): f.said for f in by_guilt(findings)}
    for look in (_deadlock, _whole_process, _going_on, _device, _locks, _joins, _waits, _outside):
        if found := look(findings):
            status, code, summary, remedy = found
            return Verdict(status, code, summary, evidence, remedy)
    asleep = [f for f in findings if f.state is State.SLEEPS]
    if asleep:
        return Verdict(Status.OK, "sleeps", f"{_names(asleep)}: sleeping", evidence)
    return Verdict(
        Status.UNKNOWN,
        "no-known-hang",
        "no thread goes on, and none waits in a known way",
        evidence,
    )


def by_guilt(findings: Iterable[Finding]) -> list[Finding]:
    """The most telling states first: the order of `State`."""
    order = list(State)
    return sorted(findings, key=lambda finding: order.index(finding.state))


Found = tuple[Status, str, str, str]


def _deadlock(findings: Sequence[Finding]) -> Found | None:
    """DF012: see repro/df012_autograd_thread_deadlock.py."""
    lazy = _in(findings, State.AWAITS_COMPILE_LOCK, detail=LAZY_BACKWARD)
    holder = _in(findings, State.COMPILE_AWAITS_AUTOGRAD)
    if not (lazy and holder):
        return None
    behind = _in(findings, State.AWAITS_AUTOGRAD)
    return (
        Status.PROBLEM,
        "DF012",
        f"deadlock: {holder[0].thread} holds torch's compile lock and waits for autograd's thread "
        f"of the device; that one ({lazy[0].thread}) compiles the backward of "
        f"{_names(behind) or 'another thread'} and waits for the lock",
        "Run backwards on the thread that calls them: dflash.compile.backward_on_this_thread, or "
        "torch.autograd.set_multithreading_enabled(False) around backward().",
    )


def _whole_process(findings: Sequence[Finding]) -> Found | None:
    """States of one thread that hold all others up."""
    if findings and all(f.state is State.STOPPED for f in findings):
        return Status.PROBLEM, "stopped", "the process is stopped", "Type: kill -CONT PID"
    if holders := _in(findings, State.HOLDS_GIL):
        who = holders[0]
        rest = f"; the other {len(findings) - 1} threads need it to go on" if findings[1:] else ""
        return Status.PROBLEM, "gil-held", f"{who}{rest}", "Its C code must release the GIL."
    if stuck := _in(findings, State.UNINTERRUPTIBLE):
        return (
            Status.PROBLEM,
            "uninterruptible",
            f"{_names(stuck)}: in uninterruptible sleep in the kernel: a disk, a network file "
            "system or a driver does not answer",
            "See /proc/PID/task/TID/stack (as root) and dmesg.",
        )
    return None


def _going_on(findings: Sequence[Finding]) -> Found | None:
    waiting = _in(findings, State.AWAITS_COMPILE_LOCK)
    if compiling := _in(findings, State.COMPILES):
        summary = str(compiling[0])
        if waiting:
            summary += f"; {_names(waiting)} wait(s) for torch's compile lock, which it holds"
            summary += f" {SUSPICION}"
        return Status.OK, "compile-under-way", f"{summary}; a compile is no hang", ""
    if running := [f for f in findings if f.state is State.RUNS and f.thread.python]:
        return Status.OK, "goes-on", f"{_names(running)} run(s)", ""
    return None


def _device(findings: Sequence[Finding]) -> Found | None:
    stuck = [f for f in findings if f.state in DEVICE]
    if not stuck:
        return None
    return (
        Status.UNKNOWN,
        "waiting-for-the-device",
        f"{'; '.join(map(str, stuck))}: if it stays so, a kernel does not end",
        "Look again later; `nvidia-smi` shows whether the GPU computes.",
    )


def _locks(findings: Sequence[Finding]) -> Found | None:
    """Python keeps no owner of a plain lock, and a native mutex may be in the circle too."""
    waiting, mutexes = _in(findings, State.LOCK), _in(findings, State.MUTEX)
    owned = {f.thread.kernel.mutex_owner for f in mutexes}
    status, but = _status(findings)
    if mutexes and owned <= {f.thread.tid for f in findings}:
        owners = [f for f in findings if f.thread.tid in owned]
        return (
            status,
            "native-mutex",
            f"{_names(mutexes)} wait(s) for a mutex of C code that {_names(owners)} hold(s)",
            "",
        )
    if len(waiting) > 1:
        return (
            status,
            "lock-cycle",
            f"{_names(waiting)} wait for locks that they hold among themselves {SUSPICION}{but}",
            "Take locks in one order everywhere.",
        )
    if waiting:
        return (
            status,
            "lock-without-owner",
            f"{waiting[0].thread} waits for a lock that no living thread would release: its owner "
            f"ended, or was left behind by a fork {SUSPICION}{but}",
            "Start processes before threads, or with the `spawn` method.",
        )
    return None


def _joins(findings: Sequence[Finding]) -> Found | None:
    """Threads that wait for one another's end; a join of another that waits is a consequence."""
    by_object = {f.thread.object_id: f for f in findings if f.thread.object_id}
    for first in _in(findings, State.JOIN):
        chain = [first]
        while (last := by_object.get(chain[-1].object_id or 0)) and last.state is State.JOIN:
            if last in chain:
                circle = chain[chain.index(last) :]
                names = " waits for ".join(f"{f.thread}" for f in [*circle, circle[0]])
                return Status.PROBLEM, "join-cycle", f"each for the other's end: {names}", ""
            chain.append(last)
    return None


def _waits(findings: Sequence[Finding]) -> Found | None:
    for state, (code, why) in WAITS.items():
        if waiting := _in(findings, state):
            missing = _missing([str(f.thread) for f in findings])
            gone = f"; {', '.join(missing)} is (are) gone" if missing else ""
            same = _largest_group(waiting)
            status, but = _status(findings)
            if state is State.EVENT and any(f.thread.runs_handlers for f in same):
                status, but = Status.UNKNOWN, f"{but}; the handler of a signal may set it"
            return (
                status,
                code,
                f"{_names(same)} {state.value}{_the_same(same)}{gone}; {why} {SUSPICION}{but}",
                "",
            )
    return None


def _outside(findings: Sequence[Finding]) -> Found | None:
    for state, (code, status, why) in OUTSIDE.items():
        if waiting := _in(findings, state):
            return status, code, f"{waiting[0]}: {why}", ""
    return None


def _status(findings: Sequence[Finding]) -> tuple[Status, str]:
    """One who sleeps, waits for the world outside, or does who knows what, may wake the others.

    So may one who waits for a limited time, which is then what is to be added: but not one who only
    waits for another's end, or draws progress bars.
    """
    others = (State.SLEEPS, State.IN_C, *OUTSIDE)
    may_act = any(f.state in others and f.thread.python for f in findings)
    limited = [
        f
        for f in findings
        if f.thread.kernel.has_limit and f.thread.python
        if f.state is not State.JOIN and not f.thread.has(TQDM, "run")
    ]
    but = f"; {_names(limited)} wait(s) for a limited time only" if limited else ""
    return Status.UNKNOWN if may_act or limited else Status.PROBLEM, but


def _in(findings: Sequence[Finding], state: State, detail: str | None = None) -> list[Finding]:
    return [f for f in findings if f.state is state and detail in (None, f.detail)]


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(sorted(str(f.thread) for f in findings))


def _largest_group(waiting: Sequence[Finding]) -> list[Finding]:
    """Those who wait for the same object, most first."""
    groups: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in waiting:
        groups[finding.object_id].append(finding)
    return max(groups.values(), key=len)


def _the_same(findings: Sequence[Finding]) -> str:
    return " (the same one)" if findings[0].object_id is not None and findings[1:] else ""


def _missing(names: Iterable[str]) -> list[str]:
    """Gaps in numbered names: warmup-2 of warmup-0 to warmup-3."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if found := re.fullmatch(r"(.+?)(\d+)", name):
            numbers[found[1]].add(int(found[2]))
    return [
        f"{prefix}{number}"
        for prefix, seen in numbers.items()
        if len(seen) > 1
        for number in sorted(set(range(min(seen), max(seen))) - seen)
    ]
