import contextvars
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dflash.concurrency
from dflash.concurrency import Cancelled, ChannelBroken, Scope, StuckThreads, TaskGroup, channel

ROOT = Path(dflash.concurrency.__file__).parents[2]


def fail(error):
    raise error


def pass_on(source, sink):
    with source, sink:
        for item in source:
            sink.send(item)


def test_no_failure_no_exception():
    done = []
    with TaskGroup("train") as group:
        group.start(done.append, 1, name="drafter-0")
        group.start(lambda: group.start(done.append, 2, name="child"), name="drafter-1")
    assert sorted(done) == [1, 2]
    assert not group.scope.cancelled


def test_no_deadline_while_nobody_failed(until_blocked):
    with TaskGroup("train", grace_s=0) as group:
        group.start(until_blocked, group.scope, name="longer-than-grace")


def test_root_cause_first_and_consequences_as_notes():
    error = ValueError("bad batch")
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        batches_in, batches_out = channel(group.scope, 1, "batches")
        features_in, features_out = channel(group.scope, 1, "features")

        def prefetch():
            with batches_in:
                raise error

        group.start(pass_on, batches_out, features_in, name="target-0")
        group.start(list, features_out, name="drafter-0")
        group.start(prefetch, name="prefetch-0")
    assert caught.value.exceptions == (error,)
    first, *rest = error.__notes__
    assert first == "in thread prefetch-0 of group train"
    # Whether each saw the break or the cancel first is a race; both are consequences.
    assert sorted(note.split(": ")[0] for note in rest) == [
        "then drafter-0 stopped",
        "then target-0 stopped",
    ]
    assert all("bad batch" in note for note in rest)


def test_a_consequence_recorded_first_is_still_not_the_root():
    error = ValueError("late to be recorded")
    consequence_recorded = threading.Event()
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        sender, receiver = channel(group.scope, 1, "batches")

        def prefetch():
            try:
                with sender:
                    raise error
            finally:
                assert consequence_recorded.wait(20), "drafter-0 hung"

        def drafter():
            with group.scope.changed:
                group.scope.wait_until(lambda: group.scope.cancelled, 20)
            consequence_recorded.set()

        group.start(list, receiver, name="target-0")
        group.start(drafter, name="drafter-0")
        group.start(prefetch, name="prefetch-0")
    assert type(group.scope.cause) is ChannelBroken
    assert caught.value.exceptions == (error,)
    assert error.__notes__[1].startswith("then target-0 stopped: ChannelBroken: channel 'batches'")


def test_independent_failures_by_time():
    first, second = ValueError("first"), ValueError("second")
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        _, receiver = channel(group.scope, 1, "never")

        def fail_after_cancel():
            try:
                receiver.receive()
            except Cancelled:
                raise second from None

        group.start(fail_after_cancel, name="drafter-1")
        group.start(fail, first, name="drafter-0")
    assert caught.value.exceptions == (first, second)
    assert second.__notes__ == ["in thread drafter-1 of group train"]


def test_channel_broken_alone_is_a_failure():
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        sender, receiver = channel(group.scope, 1, "features")
        receiver.close()
        group.start(sender.send, 1, name="target-0")
    assert [type(error) for error in caught.value.exceptions] == [ChannelBroken]


def test_a_stop_is_not_an_error():
    with TaskGroup("train") as group:
        _, receiver = channel(group.scope, 1, "never")
        group.start(receiver.receive, name="drafter-0")
        group.cancel("stopped by the user")
        receiver.receive()
    assert group.scope.reason == "stopped by the user"


def test_a_cancel_with_a_cause_is_an_error():
    stall = TimeoutError("drafter-0 is silent")
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        group.scope.cancel("watchdog", stall)
    assert caught.value.exceptions == (stall,)


def test_another_scopes_cancelled_is_not_swallowed():
    outer = Scope("outer")
    outer.cancel("outer stop")
    with pytest.raises(BaseExceptionGroup) as caught, TaskGroup("inner") as group:
        group.start(outer.check, name="drafter-0")
    assert caught.group_contains(Cancelled, match="outer stop")


def test_an_inner_groups_cancelled_is_a_consequence_outside(until_blocked):
    with TaskGroup("outer") as outer:
        _, receiver = channel(outer.scope, 1, "never")

        def nest():
            with TaskGroup("inner") as inner:
                inner.start(receiver.receive, name="inner-0")

        outer.start(nest, name="outer-0")
        until_blocked(outer.scope)
        outer.cancel("stop")
    assert outer.scope.reason == "stop"


def test_a_failure_in_the_body_counts():
    error = ValueError("body")
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train") as group:
        _, receiver = channel(group.scope, 1, "never")
        group.start(receiver.receive, name="drafter-0")
        raise error
    assert caught.value.exceptions == (error,)
    assert caught.value.__suppress_context__
    assert error.__notes__ == [
        f"in thread {threading.current_thread().name} of group train",
        f"then drafter-0 stopped: Cancelled: {threading.current_thread().name} failed: "
        "ValueError: body",
    ]


def test_system_exit_of_a_task_is_a_failure():
    with pytest.raises(BaseExceptionGroup) as caught, TaskGroup("train") as group:
        group.start(sys.exit, 3, name="drafter-0")
    assert type(caught.value.exceptions[0]) is SystemExit


def test_a_nested_groups_error_is_one_member():
    error = ValueError("inner")

    def nest():
        with TaskGroup("inner") as inner:
            inner.start(fail, error, name="inner-0")

    with pytest.raises(ExceptionGroup) as caught, TaskGroup("outer") as outer:
        outer.start(nest, name="outer-0")
    (nested,) = caught.value.exceptions
    assert nested.exceptions == (error,)
    assert nested.__notes__ == ["in thread outer-0 of group outer"]


def test_stuck_threads_are_named_with_their_stacks():
    release = threading.Event()
    threads = []

    def park_in_c():
        threads.append(threading.current_thread())
        release.wait()

    error = ValueError("first failure")
    with pytest.raises(StuckThreads) as caught, TaskGroup("train", grace_s=0.05) as group:
        group.start(park_in_c, name="drafter-0")
        group.start(fail, error, name="drafter-1")
    release.set()
    threads[0].join(20)
    assert not threads[0].is_alive(), "drafter-0 hung"
    assert caught.value.names == ("drafter-0",)
    assert "drafter-0 did not stop within 0.05 s" in str(caught.value)
    assert "in park_in_c" in str(caught.value)
    assert "os._exit(70)" in str(caught.value)
    assert caught.value.__cause__.exceptions == (error,)
    with pytest.raises(RuntimeError, match="outside its `with`"):
        group.start(print, name="late")


def test_a_thread_that_cannot_start_is_not_waited_for(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(ExceptionGroup) as caught, TaskGroup("train", grace_s=1000) as group:
        group.start(print, name="drafter-0")
    assert caught.group_contains(RuntimeError, match="can't start new thread")


def test_start_outside_or_after_cancel():
    group = TaskGroup("train")
    with pytest.raises(RuntimeError):
        group.start(print, name="early")
    with group:
        group.cancel("stop")
        with pytest.raises(Cancelled):
            group.start(print, name="late")
    with pytest.raises(RuntimeError):
        group.start(print, name="later")


PREAMBLE = """
import os, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from dflash.concurrency import StuckThreads, TaskGroup, channel

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def interrupt_when(condition):
    while not condition():
        os.sched_yield()
    interrupt()

def all_wait():
    return group.scope.waiting == 2
"""
KEYBOARD_INTERRUPT = """
try:
    with TaskGroup("train") as group:
        _, receiver = channel(group.scope, 1, "never")
        group.start(receiver.receive, name="drafter-0")
        group.start(interrupt_when, all_wait, name="ctrl-c")
except BaseExceptionGroup as error:
    assert [type(e) for e in error.exceptions] == [KeyboardInterrupt], error
    assert threading.active_count() == 1
    print("ok")
"""
INTERRUPT_IN_START = """
def interrupt_then_wait():
    interrupt()
    receiver.receive()
try:
    with TaskGroup("train") as group:
        _, receiver = channel(group.scope, 1, "never")
        group.start(interrupt_then_wait, name="ctrl-c")
except BaseExceptionGroup as error:
    assert [type(e) for e in error.exceptions] == [KeyboardInterrupt], error
    assert threading.active_count() == 1
    print("ok")
"""
SECOND_INTERRUPT = """
def interrupt_twice():
    interrupt_when(lambda: group.scope.waiting == 1)
    interrupt_when(lambda: group.scope.cancelled and group.scope.waiting == 1)
    threading.Event().wait()
try:
    with TaskGroup("train", grace_s=1000) as group:
        group.start(interrupt_twice, name="ctrl-c")
except StuckThreads as error:
    assert error.names == ("ctrl-c",)
    assert [type(e) for e in error.__cause__.exceptions] == [KeyboardInterrupt] * 2
    print("ok")
"""
CANCEL_IN_HANDLER = """
signal.signal(signal.SIGINT, lambda *_: group.cancel("ctrl-c"))
with TaskGroup("train") as group:
    _, receiver = channel(group.scope, 1, "never")
    group.start(receiver.receive, name="drafter-0")
    group.start(interrupt_when, all_wait, name="ctrl-c")
assert group.scope.reason == "ctrl-c"
print("ok")
"""
CANCEL_BETWEEN_PREDICATE_AND_WAIT = """
from dflash.concurrency import Cancelled
signal.signal(signal.SIGINT, lambda *_: group.cancel("ctrl-c"))
with TaskGroup("train") as group:
    def false_then_signal():
        if not group.scope.cancelled:
            signal.raise_signal(signal.SIGINT)
        return False
    with group.scope.changed:
        group.scope.wait_for(false_then_signal, what="nothing", timeout_s=None)
assert group.scope.reason == "ctrl-c"
print("ok")
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(KEYBOARD_INTERRUPT, id="Ctrl-C"),
        pytest.param(INTERRUPT_IN_START, id="Ctrl-C while a thread starts"),
        pytest.param(SECOND_INTERRUPT, id="second Ctrl-C"),
        pytest.param(CANCEL_IN_HANDLER, id="cancel in handler"),
        pytest.param(CANCEL_BETWEEN_PREDICATE_AND_WAIT, id="cancel between predicate and wait"),
    ],
)
def test_signals_in_a_child_process(script):
    command = [sys.executable, "-c", PREAMBLE + script]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert child.stdout == "ok\n", child.stderr


def test_a_setting_in_a_context_variable_holds_in_the_threads():
    """torch keeps its configs in such variables from 2.12 on (pytorch#173568)."""
    setting = contextvars.ContextVar("setting", default="default")
    setting.set("mine")
    seen = []
    with TaskGroup("train") as group:
        group.start(lambda: seen.append(setting.get()), name="drafter-0")
    assert seen == ["mine"]
