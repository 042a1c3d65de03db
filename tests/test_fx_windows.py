"""The live view of FX traces: which thread, which tracer, the lock, how long."""

import threading

import pytest
import torch
import torch.fx
from torch._dynamo import convert_frame

from dflash.fx_windows import Window, Windows, trace_windows

DEADLINE_S = 60.0


class Parked(torch.nn.Module):
    """A module that calls `inside` while it is traced."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        self.inside()
        return x + 1


class OwnTracer(torch.fx.Tracer):
    pass


def test_a_window_is_open_while_it_is_traced_and_timed_afterwards():
    shown = []
    with trace_windows(shown.append) as windows:
        open_inside = []
        OwnTracer().trace(Parked(lambda: open_inside.extend(map(str, windows.open_now()))))
        assert windows.open_now() == []
    name = threading.current_thread().name
    assert open_inside == [f"{name}: OwnTracer, does not hold the compile lock, open"]
    (window,) = windows.seen
    assert shown == [window]
    assert window.seconds >= 0


def test_who_holds_the_lock_is_said():
    with trace_windows() as windows, convert_frame.compile_lock:
        torch.fx.symbolic_trace(torch.nn.Identity())
    assert [window.lock_held for window in windows.seen] == [True]


def test_threads_that_trace_at_once_are_counted():
    with trace_windows() as windows:
        inside, seen = threading.Event(), threading.Event()

        def park():
            inside.set()
            assert seen.wait(DEADLINE_S)

        thread = threading.Thread(target=lambda: torch.fx.Tracer().trace(Parked(park)), name="A")
        thread.start()
        assert inside.wait(DEADLINE_S)
        # Not a real trace, which would break the parked one: this is what the view is there for.
        windows.seen.append(Window("B", "Tracer", False, windows.seen[0].opened_s + 1e-9, 1e-9))
        assert windows.threads_at_once() == 2
        seen.set()
        thread.join(DEADLINE_S)
    assert [window.thread for window in windows.seen] == ["A", "B"]


def test_windows_one_after_the_other_are_not_at_once():
    windows = Windows(
        [Window("A", "Tracer", False, 0.0, 1.0), Window("B", "Tracer", False, 2.0, 1.0)]
    )
    assert windows.threads_at_once() == 1
    assert Windows().threads_at_once() == 0


def test_afterwards_nothing_is_left():
    before = torch.fx.Tracer.trace
    with pytest.raises(ZeroDivisionError), trace_windows():
        torch.fx.Tracer().trace(Parked(lambda: 1 // 0))
    assert torch.fx.Tracer.trace is before
