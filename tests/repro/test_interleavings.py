"""The search over schedules, on small programs whose schedules can be counted by hand."""

import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))

import interleavings
from interleavings import Trial, explore, replay
from turns import CooperativeLock, Step, Unclear, stop_at, wait_until


def fine(_ended):
    return None


def steps(count):
    """A thread that touches nothing, at `count` points."""

    def body():
        for number in range(count):
            stop_at(f"step {number}")

    return body


def trial(judge=fine, **bodies):
    return Trial(bodies, judge)


def increments(lock=None):
    """Two threads that add one: read, then write, at points of their own."""
    shared = SimpleNamespace(count=0)

    def add():
        stop_at("reads")
        seen = shared.count
        stop_at("writes")
        shared.count = seen + 1

    def locked_add():
        with lock():
            add()

    def judge(_ended):
        return None if shared.count == 2 else "lost update"

    body = locked_add if lock else add
    return trial(judge, A=body, B=body)


def locked_increments():
    one = CooperativeLock("the lock")
    return increments(lambda: one)


@pytest.mark.parametrize("counts", [(1, 1), (3, 2), (5, 2), (2, 2, 2)])
def test_independent_steps_make_as_many_schedules_as_there_are_orders(counts):
    found = explore(lambda: trial(**{f"T{i}": steps(n) for i, n in enumerate(counts)}), {})
    orders = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    assert len(found.schedules) == len({one.steps for one in found.schedules}) == orders
    assert found.complete and not found.bad


@pytest.mark.parametrize(("bound", "count"), [(0, 2), (1, 10), (2, 42)])
def test_the_bound_counts_preemptions_only(bound, count):
    """Of two threads with five steps: the order, where the first one stops, where the other one."""
    found = explore(lambda: trial(A=steps(5), B=steps(5)), {}, preemptions=bound)
    assert len(found.schedules) == count
    assert max(one.preemptions for one in found.schedules) == bound
    everything = explore(lambda: trial(A=steps(5), B=steps(5)), {})
    within = {one.steps for one in everything.schedules if one.preemptions <= bound}
    assert {one.steps for one in found.schedules} == within


def test_of_threads_that_are_alike_the_first_one_begins():
    everything = explore(increments, {})
    half = explore(increments, {}, alike=True)
    assert half.complete
    assert list(half.schedules) == [s for s in everything.schedules if s.steps[0].thread == "A"]


def test_a_lost_update_needs_one_preemption():
    found = explore(increments, {})
    assert found.complete
    assert len(found.bad) == 4  # of six: all but A before B and B before A
    simplest = found.bad[0]
    assert (simplest.failure, simplest.preemptions) == ("lost update", 1)
    assert simplest.steps[:2] == (Step("A", "reads"), Step("B", "reads"))
    assert not explore(increments, {}, preemptions=0).bad


def test_a_lock_prevents_it():
    found = explore(locked_increments, {})
    assert found.complete and not found.bad
    assert len(found.schedules) == 2  # who comes second waits for the release


class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        seen = self.count
        self.count = seen + 1


def test_watched_lines_are_points():
    code = Counter.add.__code__
    first = code.co_firstlineno
    watched = {code: {first + 1: "reads {self.count}", first + 2: "writes over {seen}"}}

    def fresh():
        counter = Counter()
        judge = lambda _ended: None if counter.count == 2 else "lost update"  # noqa: E731
        return trial(judge, A=counter.add, B=counter.add)

    simplest = explore(fresh, watched).bad[0]
    assert [step.point for step in simplest.steps] == [
        *("reads 0", "reads 0"),
        *("writes over 0", "writes over 0"),
    ]


def locks_in_two_orders():
    one, two = CooperativeLock("one"), CooperativeLock("two")

    def take(first, second):
        with first, second:
            pass

    return trial(A=lambda: take(one, two), B=lambda: take(two, one))


def test_a_lock_order_deadlock_is_a_bad_schedule():
    before = threading.active_count()
    found = explore(locks_in_two_orders, {})
    assert found.complete and not found.unclear
    expected = "deadlock: A waits where it takes two, B waits where it takes one"
    assert found.bad[0].failure == expected
    assert found.bad[0].preemptions == 1
    assert threading.active_count() == before


def test_a_lock_is_reentrant_and_belongs_to_its_thread():
    lock = CooperativeLock("the lock")

    def nested():
        with lock, lock:
            stop_at("inside")

    found = explore(lambda: trial(A=nested, B=nested), {})
    assert found.complete and not found.bad
    assert lock.acquire(blocking=False)
    lock.release()
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()


def test_a_lock_that_is_only_tried_is_no_deadlock():
    def fresh():
        lock, won = CooperativeLock("the lock"), []

        def attempt():
            if lock.acquire(blocking=False):
                stop_at("inside")
                won.append(threading.current_thread().name)
                lock.release()

        return trial(lambda _ended: "both" if len(won) == 2 else None, A=attempt, B=attempt)

    found = explore(fresh, {})
    failures = [one.failure for one in found.schedules]
    assert found.complete and {None, "both"} == set(failures)


def test_a_condition_is_waited_for_in_sight():
    def fresh():
        seen = SimpleNamespace(ready=False)

        def announce():
            stop_at("announces")
            seen.ready = True

        def waits():
            wait_until(lambda: seen.ready, "waits for the word")
            assert seen.ready

        judge = lambda ended: ended["B"].error and "too early"  # noqa: E731
        return trial(judge, A=announce, B=waits)

    found = explore(fresh, {})
    assert [one.failure for one in found.schedules] == [None]


def test_a_block_out_of_sight_cannot_be_told():
    before = threading.active_count()

    def fresh():
        hidden = threading.Lock()

        def blocks():
            with hidden:
                stop_at("holds the hidden lock")

        return trial(A=blocks, B=blocks)

    found = explore(fresh, {}, deadline_s=0.5)
    assert not found.complete and not found.bad
    assert "B, going on from where it starts" in found.unclear
    assert "in blocks\n" in found.unclear  # its stack
    assert "could not be ended" not in found.unclear
    assert threading.active_count() == before


def test_who_cannot_be_ended_is_named():
    release = threading.Event()
    found = explore(lambda: trial(A=release.wait, B=steps(1)), {}, deadline_s=0.5)
    assert found.unclear.endswith("A could not be ended")
    release.set()


def test_threads_that_do_something_else_the_next_time_are_noticed():
    runs = []

    def fresh():
        runs.append(len(runs))
        return trial(A=steps(2 if len(runs) == 1 else 1), B=steps(1))

    found = explore(fresh, {})
    assert not found.complete
    assert "do not do the same every time" in found.unclear


def test_a_limit_that_is_hit_is_not_completeness():
    found = explore(increments, {}, limit=3)
    assert (len(found.schedules), found.complete, found.unclear) == (3, False, "")
    assert explore(increments, {}, limit=6).complete


def test_a_schedule_can_be_replayed():
    for schedule in explore(increments, {}).schedules:
        assert replay(increments, {}, schedule.steps) == schedule


@pytest.mark.parametrize("other", [locked_increments, lambda: trial(A=steps(4), B=steps(0))])
def test_a_replay_that_meets_other_points_cannot_be_told(other):
    steps = explore(increments, {}).bad[0].steps
    with pytest.raises(Unclear):
        replay(other, {}, steps)


def test_what_a_thread_dies_of_is_for_the_trial_to_judge():
    def dies():
        stop_at("dies")
        raise ValueError("A is done for")

    judge = lambda ended: f"{ended['A'].error}, {ended['B'].value}"  # noqa: E731
    found = explore(lambda: trial(judge, A=dies, B=lambda: "fine"), {})
    assert [one.failure for one in found.schedules] == ["A is done for, fine"]


def test_a_thread_that_is_given_up_still_cleans_up():
    cleaned = []

    def fresh():
        one, two = CooperativeLock("one"), CooperativeLock("two")

        def take(first, second):
            try:
                with first, second:
                    pass
            finally:
                stop_at("cleans up")
                cleaned.append(threading.current_thread().name)

        return trial(A=lambda: take(one, two), B=lambda: take(two, one))

    found = explore(fresh, {})
    assert found.bad
    assert len(cleaned) == 2 * len(found.schedules)


def test_the_trial_is_made_anew_for_each_schedule():
    made = []

    def fresh():
        made.append(None)
        return increments()

    assert len(interleavings.explore(fresh, {}).schedules) == len(made)
