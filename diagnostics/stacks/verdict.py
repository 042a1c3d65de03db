"""Who is to blame: the sentence above the stacks."""

from collections.abc import Sequence

from diagnostics.stacks.states import Finding, State
from diagnostics.verdict import Status, Verdict


def judge(findings: Sequence[Finding]) -> Verdict:
    """One verdict over all threads of a process. A long compile or a busy device is no problem."""
    if cycle := _deadlock(findings):
        return cycle
    waiting = [f for f in findings if f.state is State.AWAITS_COMPILE_LOCK]
    compiling = [f for f in findings if f.state is State.COMPILES]
    evidence = {str(f.thread): f"{f.state}{f' ({f.detail})' if f.detail else ''}" for f in findings}
    if waiting and compiling:
        who = ", ".join(str(f.thread) for f in waiting)
        return Verdict(
            Status.OK,
            "compile-under-way",
            f"{compiling[0]}; {who} wait(s) for torch's compile lock, which it holds (suspicion)",
            evidence,
        )
    for state in (State.AWAITS_DEVICE, State.AWAITS_EVENT, State.AWAITS_STREAM):
        if stuck := [f for f in findings if f.state is state]:
            return Verdict(
                Status.OK,
                "waiting-for-the-device",
                f"{'; '.join(map(str, stuck))}: if it stays so, a kernel does not end",
                evidence,
            )
    return Verdict(Status.OK, "no-known-hang", f"{len(findings)} threads, no known hang", evidence)


def _deadlock(findings: Sequence[Finding]) -> Verdict | None:
    """DF012: see repro/df012_autograd_thread_deadlock.py."""
    lazy = [f for f in findings if f.state is State.AWAITS_COMPILE_LOCK and "backward" in f.detail]
    holder = [f for f in findings if f.state is State.COMPILE_AWAITS_AUTOGRAD]
    if not (lazy and holder):
        return None
    behind = [f for f in findings if f.state is State.AWAITS_AUTOGRAD]
    waits = ", ".join(str(f.thread) for f in behind) or "a backward"
    return Verdict(
        Status.PROBLEM,
        "DF012",
        f"deadlock: {holder[0].thread} holds torch's compile lock and waits for autograd's thread "
        f"of the device; that one ({lazy[0].thread}) compiles the backward of {waits} and waits "
        "for the lock",
        {str(f.thread): f"{f.state}{f' ({f.detail})' if f.detail else ''}" for f in findings},
        "Run backwards on the thread that calls them: dflash.compile.backward_on_this_thread, or "
        "torch.autograd.set_multithreading_enabled(False) around backward().",
    )
