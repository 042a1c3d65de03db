"""The search of states, and the real gate under it, on cases small enough for a test.

The bugs are the control: the same search that finds nothing in the real code must find each.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "repro"))

from gate_bugs import BUGS
from gate_model import Machine
from gate_scenarios import SCENARIOS, Size
from gate_trials import prepared
from interleavings import Trial, explore
from states import Search
from timeline import WIDTH, steps_in_lanes
from turns import Touched, stop_at

SMALLEST, SMALL = Size(1, 1, 0, 1), Size(2, 1, 0, 2)


def reading_and_writing(*threads):
    """Threads that each do one thing with one variable, at a point that says so."""

    def fresh():
        values, record = SimpleNamespace(), SimpleNamespace(touched=Touched())

        def body(name, variable):
            def run():
                stop_at(f"writes {variable}")
                both = frozenset({f"writes {variable}"})
                record.touched = Touched(both, both)
                setattr(values, variable, name)

            return run

        def touched():
            now, record.touched = record.touched, Touched()
            return now

        return Trial(
            {f"T{n}": body(f"T{n}", variable) for n, variable in enumerate(threads)},
            lambda _ended: None,
            outcome=lambda _ended: str(sorted(vars(values).items())),
            state=lambda company: (
                str(sorted(vars(values).items())),
                *(player.ended is None for player in company),
            ),
            touched=touched,
        )

    return fresh


@pytest.mark.parametrize("variables", ["ab", "aa", "aab", "abc", "aabb"])
def test_the_reduction_keeps_every_end(variables):
    everything = explore(reading_and_writing(*variables), {})
    found = Search(reading_and_writing(*variables)).run()
    assert found.complete
    assert set(found.outcomes) == {one.outcome for one in everything.schedules}
    assert found.ended <= len(everything.schedules)


def test_what_is_independent_is_run_in_one_order():
    found = Search(reading_and_writing(*"abcd")).run()
    assert (found.runs, found.ended) == (1, 1)  # of 24 orders
    unreduced = Search(reading_and_writing(*"abcd"), reduce=False).run()
    assert unreduced.states > found.states


def test_a_limit_is_no_proof():
    found = Search(reading_and_writing(*"aab"), limit=1).run()
    assert not found.complete


@pytest.mark.parametrize("scenario", ["slow", "target-raises"])
def test_with_and_without_the_reductions_the_ends_are_the_same(scenario):
    with prepared(scenario, SMALLEST) as fresh:
        reduced = Search(fresh).run()
    with prepared(scenario, SMALLEST, atomic=False, skips_vain=False) as fresh:
        unreduced = Search(fresh, reduce=False).run()
    assert reduced.complete and unreduced.complete
    assert not reduced.failing and not unreduced.failing
    assert set(reduced.outcomes) == set(unreduced.outcomes)
    assert reduced.states < unreduced.states


def test_without_any_reduction_the_ends_are_the_same():
    """Every schedule of a drafter and the main thread, one by one, no state remembered."""
    alone = Size(1, 0, 0, 0)
    with prepared("healthy", alone, atomic=False, skips_vain=False) as fresh:
        everything = explore(fresh, {})
    with prepared("healthy", alone) as fresh:
        found = Search(fresh).run()
    assert everything.complete and not everything.bad
    assert set(found.outcomes) == {one.outcome for one in everything.schedules} == {"finished"}
    assert found.runs < len(everything.schedules)


@pytest.mark.parametrize(
    ("scenario", "ends"),
    [
        ("healthy", {"finished"}),
        ("raises", {"Broke in drafter-1"}),
        ("hangs", {"drafter-1 did not stop; GateTimeout: drafter-1 warming up"}),
    ],
)
def test_two_drafters_and_a_target_end_right_in_every_order(scenario, ends):
    with prepared(scenario, SMALL) as fresh:
        found = Search(fresh).run()
    assert found.complete and not found.unclear
    assert found.states > 100
    assert set(found.outcomes) == ends


@pytest.mark.parametrize("scenario", ["slow", "stop", "stop-hangs"])
def test_what_may_come_at_any_moment_ends_right_without_preemptions(scenario):
    with prepared(scenario, SMALLEST if scenario != "stop-hangs" else SMALL) as fresh:
        found = Search(fresh, preemptions=0).run()
    assert found.complete and not found.failing, found
    assert len(found.outcomes) > 1  # it did come at several moments


@pytest.mark.parametrize("name", BUGS)
def test_every_planted_bug_is_found(name):
    bug = BUGS[name]
    for bound in range(3):
        with prepared(bug.scenario, SMALL, skips_vain=False, bug=bug) as fresh:
            found = Search(fresh, preemptions=bound).run()
        if found.failing:
            break
    assert found.simplest is not None, found
    assert found.simplest.failure.startswith(("P1: ", "P2: ", "P4: "))
    lines = [*steps_in_lanes(found.simplest)]
    assert lines[-1].startswith("=> P") or lines[-2].startswith("=> P")
    assert max(map(len, lines)) <= WIDTH


def test_nothing_of_the_stand_ins_is_left():
    from dflash.concurrency import Gate, Scope

    before = Gate.arrive, Gate.__getattribute__, Scope.__setattr__
    with prepared("healthy", SMALLEST, bug=BUGS["missing-notify"]):
        assert Gate.arrive is not before[0]
        assert type(Scope("inside").changed).__module__ == "gate_threads"
    assert (Gate.arrive, Gate.__getattribute__, Scope.__setattr__) == before
    assert type(Scope("outside").changed).__module__ == "threading"


def test_every_scenario_says_what_may_go_wrong():
    assert {bug.scenario for bug in BUGS.values()} <= SCENARIOS.keys()
    machine = Machine(atomic=True, skips_vain=True, early_s=0.0, signals=False)
    assert machine.alone() == "" and machine.forgotten() == []
