"""What each probe looks at, broken one thing at a time: a probe that still says ok fails the build.

Each probe has a healthy state, for which it must say ok (the control), and mutants of what it sees.
`pytest -s tests/test_mutants.py` prints probes x mutants x caught. Preflight, launch-check and
gate-check have theirs beside their own tests: looks taken away, launches spoiled, planted bugs.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from diagnostics.deploy import compare, fingerprint
from diagnostics.environment import difference
from diagnostics.everything import Probe, Told, summed_up
from diagnostics.probes import env
from diagnostics.probes.fxrace import table
from diagnostics.reproducers import Outcome
from diagnostics.stacks.states import Finding, State
from diagnostics.stacks.threads import Frame, Kernel, Thread
from diagnostics.stacks.verdict import judge
from diagnostics.verdict import Status, Verdict

Mutants = Iterator[tuple[str, Callable[[], Verdict]]]
FILES = {name: {"sha256": name * 8, "size": 1, "mtime": 1.0} for name in ("a.py", "b.py")}
PLACE = {"directory": "/d", "host": "h", "files": FILES, "bytecode": {}, "defines": {"p.a:f": True}}


def deploy_check(place=PLACE):
    return compare.judge({**PLACE}, place, "here", expect=["p.a:f"])


def deploy_check_mutants() -> Mutants:
    for name in FILES:
        other, missing = copy.deepcopy(PLACE), copy.deepcopy(PLACE)
        other["files"][name]["sha256"] = "0"
        del missing["files"][name]
        yield f"{name} differs", lambda other=other: deploy_check(other)
        yield f"{name} is missing", lambda missing=missing: deploy_check(missing)
    more = copy.deepcopy(PLACE)
    more["files"]["c.py"] = FILES["a.py"]
    yield "a file too many", lambda: deploy_check(more)
    unchecked = {"__pycache__/a.pyc": fingerprint.UNCHECKED}
    yield "unchecked bytecode", lambda: deploy_check({**PLACE, "bytecode": unchecked})
    for said in (False, "there is no module p.a"):
        gone = {**PLACE, "defines": {"p.a:f": said}}
        yield f"a name is gone: {said}", lambda gone=gone: deploy_check(gone)


SEEN = {
    "torch": {"version": "2.13", "inductor settings": "ab"},
    "driver": {"NVIDIA": "580"},
    "packages for compiling and numerics": {"triton": "3 (aa)"},
    "variables": {"OMP_NUM_THREADS": "1"},
    "python": {"version": "3.11"},
    "system": {"kernel": "6"},
    "limits": {"NOFILE": "1 of 1"},
    "all packages": {"triton": "3 (aa)", "click": "8 (bb)"},
}


def env_diff(other=SEEN):
    return difference.judge(SEEN, other, ("a", "b"))


def env_diff_mutants() -> Mutants:
    for section, values in SEEN.items():
        for name in values:
            other, less = copy.deepcopy(SEEN), copy.deepcopy(SEEN)
            other[section][name] = "another"
            del less[section][name]
            yield f"{section}: {name} differs", lambda other=other: env_diff(other)
            yield f"{section}: {name} is not there", lambda less=less: env_diff(less)
    yield (
        "torch cannot be asked on either side",
        lambda: difference.judge(*[{**SEEN, "torch": {"unknown": "x"}}] * 2, ("a", "b")),
    )


def cells(**changed):
    """A torch on which nothing happens, with a single thread that works; one cell may differ."""
    healthy = {
        "DF000": table.Cell("DF000", "none", "later", Outcome.ABSENT, "works"),
        **{
            code: table.Cell(code, "none", "later", Outcome.ABSENT, "fine")
            for code in ("DF001", "DF003")
        },
    }
    return table.judge(table.Report("9.9", tuple((healthy | changed).values())))


def fxrace_mutants() -> Mutants:
    for code in ("DF000", "DF001", "DF003"):
        for outcome in set(Outcome) - {Outcome.ABSENT, Outcome.MEASURED}:
            cell = table.Cell(code, "none", "later", outcome, "x")
            yield f"{code} {outcome}", lambda code=code, cell=cell: cells(**{code: cell})
        masked = table.Cell(code, "none", "later", Outcome.ABSENT, "x", "masked")
        if code != "DF000":
            yield f"{code} masked", lambda code=code, masked=masked: cells(**{code: masked})


BUSY = {State.RUNS, State.COMPILES, State.SLEEPS}
WORKER = Thread("worker", 2, (Frame("work", "/w.py", 1),), kernel=Kernel("S"))


def stacks(*findings):
    return judge(findings or [Finding(WORKER, State.RUNS)])


def stacks_mutants() -> Mutants:
    for state in set(State) - BUSY:
        yield str(state), lambda state=state: stacks(Finding(WORKER, state))
    owner = replace(WORKER, name="owner", tid=3)
    waiter = replace(WORKER, kernel=Kernel("S", mutex_owner=3))
    yield (
        "a mutex that a waiting thread holds",
        lambda: stacks(Finding(waiter, State.MUTEX), Finding(owner, State.EVENT)),
    )


def everything(*statuses):
    told = [
        Told(Probe(f"p{i}", ("x",)), Verdict(Status(status), "c", "s"), 0.0)
        for i, status in enumerate(("ok", "ok", *statuses))
    ]
    return summed_up(told, [])


def everything_mutants() -> Mutants:
    for status in ("problem", "unknown"):
        yield f"one probe says {status}", lambda status=status: everything(status)


PROBES = {
    "deploy-check": (deploy_check, deploy_check_mutants),
    "env --diff": (env_diff, env_diff_mutants),
    "fxrace": (cells, fxrace_mutants),
    "stacks": (stacks, stacks_mutants),
    "all": (everything, everything_mutants),
}


@pytest.mark.parametrize("name", PROBES)
def test_no_mutant_is_called_ok(name):
    healthy, mutants = PROBES[name]
    assert healthy().status is Status.OK  # the control: the probe can say so
    said = {what: mutant().status for what, mutant in mutants()}
    caught = [what for what, status in said.items() if status is not Status.OK]
    print(f"{name}: {len(said)} mutants, {len(caught)} caught")
    assert set(said) - set(caught) == set()
    assert len(said) > 1


@pytest.fixture
def own_dflash(monkeypatch):
    """A manifest module whose answers a test may change."""
    manifest = env._load_manifest()
    monkeypatch.setattr(env, "_load_manifest", lambda: manifest)
    return manifest


def test_env_sees_each_thing_that_it_looks_at(own_dflash, monkeypatch):
    assert env.probe().status is Status.OK
    doubles = [own_dflash.DoubleOwner("dflash", ("other 1",), "/elsewhere")]
    monkeypatch.setattr(own_dflash, "double_owners", lambda: doubles)
    assert env.probe().code == "import-name-owned-twice"
    monkeypatch.setattr(own_dflash, "double_owners", list)
    for answer in ("/elsewhere/dflash/__init__.py", None):
        monkeypatch.setattr(own_dflash, "import_path", lambda _name, answer=answer: answer)
        assert env.probe().code == "dflash-from-elsewhere"
