"""What the checks see, reduced to the processes that a test started."""

import os
from dataclasses import replace

import pytest

from diagnostics import processes
from diagnostics.preflight.line import Run, Seen


@pytest.fixture
def seen():
    """A function: what is seen of these processes (names or numbers), as `Seen` has it."""

    def look(*pids, **given):
        table = processes.look()
        ours = tuple(p for p in table.processes if p.pid in set(map(int, pids)))
        return Seen(replace(table, processes=ours), **{"environ": {"PATH": "/bin"}, **given})

    return look


@pytest.fixture
def everybody():
    """A function: `Seen` of all processes here but those that this machine hides."""

    def look(**given):
        table = processes.look()
        readable = tuple(p for p in table.processes if p.is_readable)
        return Seen(replace(table, processes=readable), **given)

    return look


@pytest.fixture
def run(train_config, tmp_path):
    """A function that makes the Run of a small configuration with changes by section."""

    def make(pid=None, **sections):
        return Run(train_config(**sections), tmp_path / "out", pid)

    return make


@pytest.fixture
def device(tmp_path):
    """A file that stands in for a GPU."""
    path = tmp_path / "nvidia0"
    path.write_bytes(b"x")
    return path


@pytest.fixture
def segment():
    """A name in /dev/shm, whatever is there afterwards removed."""
    path = processes.Path(f"/dev/shm/psm_test{os.getpid()}_{os.urandom(4).hex()}")
    yield path
    path.unlink(missing_ok=True)
