"""DF014: after the first thread that compiled has ended, the next compile crashes the process.

What happens: torch built for CUDA, a machine or a container without a GPU. A thread compiles and
ends; whoever compiles next, in another thread, dies of SIGSEGV in
`c10::impl::ensureCUDADeviceGuardSet`.

Why: for a trace without a device torch puts a stand-in in the place of CUDA's device guard. The
stand-in belongs to the thread that made it (`tls_fake_device_guard` in
c10/core/impl/DeviceGuardImplInterface.cpp), and the process-wide registry goes on pointing to it.

When harmless: with a GPU, with a torch built without CUDA, or where the main thread compiles first.

Cure: shipped, or main-thread-first: the main thread, which outlives the others, makes the stand-in.

Upstream: no issue found. Measured on 2.11.0+cu130; absent on 2.13.0+cu130.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback

import harness
import torch
from cures import Cure


def reproduce(run: harness.Run) -> harness.Finding:
    run.stage.gate_parties = 1
    alone, both = (_in_a_process(run, threads) for threads in (1, 2))
    if alone != 0:
        return harness.Finding("cannot tell", f"one thread that compiles: exit code {alone}")
    run.opened("a compile in a process of its own")
    if both == -signal.SIGSEGV:
        return harness.judged(True, "a compile after the first one's thread had ended: SIGSEGV")
    if both != 0:
        return harness.Finding("cannot tell", f"two threads, one after the other: exit code {both}")
    return harness.judged(False, "two threads compiled, one after the other")


def _in_a_process(run: harness.Run, threads: int) -> int:
    """The exit code of a fork in which so many threads compile, or -SIGALRM at the deadline."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(int(run.stage.deadline_s))
    try:
        _compile_in(threads, run.cure)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _compile_in(threads: int, cure: Cure) -> None:
    if cure.main_thread_first:
        _compile(cure)
    for _ in range(threads):
        thread = threading.Thread(target=_compile, args=(cure,))
        thread.start()
        thread.join()


def _compile(cure: Cure) -> None:
    with cure.step():
        torch.compile(harness.own_code(_double), backend="eager")(torch.ones(2))


def _double(x_N: torch.Tensor) -> torch.Tensor:
    return 2 * x_N


if __name__ == "__main__":
    harness.main("DF014", "guard-of-an-ended-thread", __doc__, reproduce)
