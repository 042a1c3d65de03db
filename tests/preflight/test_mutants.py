"""Every check with its look broken, one way at a time: none may still say that all is well.

A mutant replaces one look by one that sees nothing. The scene is one in which there is something
to be seen, so that "ok" would be wrong.
"""

import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from diagnostics import gpus, processes
from diagnostics.launch import onsite, tmux_session
from diagnostics.preflight import checks, devices, leftovers, machine
from diagnostics.preflight import run as needs
from diagnostics.preflight.line import Run
from diagnostics.verdict import Status
from tests.preflight.leftovers_made import DELETED, HOLD, ORPHAN, READY, SEGMENT, ZOMBIE, child

NOTHING: Any = object()


@dataclass
class Stage:
    """What the scenes need."""

    seen: Any
    run: Any
    tmp: Any
    segment: Any
    patch: pytest.MonkeyPatch


@contextmanager
def holder(stage, how):
    device = stage.tmp / "nvidia0"
    device.write_bytes(b"x")
    with child(HOLD + READY, device, how) as (process, _):
        yield lambda: stage.seen(process.pid, gpu=re.compile(re.escape(str(device))))


@contextmanager
def zombie(stage):
    (stage.tmp / "held").write_bytes(b"x")
    with child(ZOMBIE, stage.tmp / "held") as (process, _):
        yield lambda: stage.seen(process.pid)


@contextmanager
def orphan(stage):
    with child(ORPHAN, env={**os.environ, "TORCHELASTIC_RUN_ID": "1"}) as (_, pid):
        yield lambda: stage.seen(pid)


@contextmanager
def deleted(stage):
    with child(DELETED, stage.tmp / "log") as (process, _):
        yield lambda: stage.seen(process.pid)


@contextmanager
def unmapped(stage):
    with child(SEGMENT + READY, stage.segment):
        pass
    yield stage.seen


@contextmanager
def busy_gpu(stage):
    tool = stage.tmp / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, 40213, 100'\n")
    tool.chmod(0o755)
    stage.patch.setenv("PATH", f"{stage.tmp}:{os.environ['PATH']}")
    stage.patch.setattr(gpus, "device_files", lambda: ["/dev/nvidia0"])
    stage.patch.setattr(gpus, "ASK_NVML", "raise SystemExit(3)")
    yield lambda: stage.seen(run=stage.run(devices={"target-gpus": "0", "drafter-gpus": "7"}))


@contextmanager
def bad_setting(stage):
    yield lambda: stage.seen(environ=dict(os.environ))


@contextmanager
def as_it_is(stage):
    yield stage.seen


@contextmanager
def late_file(stage):
    made = stage.run()
    made.directory.mkdir()
    (made.directory / "train.log").touch()
    os.utime(made.directory / "train.log", (time.time() + 9999,) * 2)
    yield lambda: stage.seen(run=made)


@contextmanager
def closed_cache(stage):
    yield lambda: stage.seen(environ={"TORCHINDUCTOR_CACHE_DIR": "/proc/cache"})


@contextmanager
def taken_port(stage):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield lambda: stage.seen(ports=(listener.getsockname()[1],))


@contextmanager
def taken_session(stage):
    stage.patch.setenv("TMUX_TMPDIR", str(stage.tmp))
    stage.patch.delenv("TMUX", raising=False)
    subprocess.run(["tmux", "-f", "/dev/null", "new-session", "-d", "-s", "train"], check=True)
    try:
        yield lambda: stage.seen(session="train")
    finally:
        subprocess.run(["tmux", "kill-server"], check=True)


@contextmanager
def used_directory(stage):
    with child("import sys" + READY, "--output-dir", "out", cwd=stage.tmp) as (process, _):
        yield lambda: stage.seen(process.pid, run=stage.run())


def asked(subject):
    """The line of one subject of the child's."""

    def check(seen):
        path = seen.run.directory.parent / "run.toml"
        seen.run.config.save_toml(path)
        return next(x for x in needs.inquire(path, seen, str) if x.name == subject)

    return check


@contextmanager
def a_run(stage):
    yield lambda: stage.seen(run=stage.run())


def refuse(*_):
    raise PermissionError(13, "refused")


PROC = [
    (processes, "_pids", []),
    (processes, "_words", ()),
    (processes, "_links", {}),
    (processes, "_mappings", ((), frozenset())),
    (processes, "_mappings", refuse),
    (processes, "_links", refuse),
    (onsite, "stat", []),
]
ENV = [(leftovers, "_environment", {})]
MUTANTS = [
    *(("holder, open", leftovers.gpu_holders, lambda s: holder(s, "open"), m) for m in PROC),
    *(("holder, mapped", leftovers.gpu_holders, lambda s: holder(s, "mapped"), m) for m in PROC),
    *(
        ("zombie", leftovers.zombie_leaders, zombie, m)
        for m in [*PROC, (processes, "_threads", [])]
    ),
    *(("orphan", leftovers.orphans, orphan, m) for m in [*PROC, *ENV]),
    *(("deleted log", leftovers.deleted_outputs, deleted, m) for m in PROC),
    *(
        ("segment", leftovers.shared_memory, unmapped, m)
        for m in [*PROC, (leftovers, "_entries", []), (leftovers, "_entries", refuse)]
    ),
    *(
        ("GPU memory", devices.gpu_memory, busy_gpu, m)
        for m in [
            (gpus, "_answer", None),
            (gpus, "_from_smi", []),
            (gpus, "_smi", []),
            (gpus, "device_files", []),
            (processes, "_pids", []),
        ]
    ),
    *(
        ("GPU numbers", devices.device_numbers, busy_gpu, m)
        for m in [(gpus, "_answer", None), (gpus, "ask", None), (gpus, "ask", [])]
    ),
    ("settings", devices.settings, bad_setting, (os, "environ", NOTHING)),
    ("limits", machine.limits, as_it_is, (machine.psutil, "process_iter", [])),
    ("memory", machine.memory, as_it_is, (machine, "_meminfo", {})),
    *(
        ("clock", machine.clock, late_file, m)
        for m in [(machine, "_files", []), (machine, "_mtime", 0.0), (machine.time, "time", 0.0)]
    ),
    *(
        ("compile cache", machine.caches, closed_cache, m)
        for m in [(machine, "_cache_directories", []), (onsite, "obstacles", [])]
    ),
    *(
        ("port", machine.ports, taken_port, m)
        for m in [(machine, "_listeners", {}), (machine, "_why_not", "")]
    ),
    *(
        ("tmux session", machine.tmux, taken_session, m)
        for m in [(tmux_session, "_call", None), (tmux_session, "ask", None)]
    ),
    *(
        ("output directory", needs.output_directory, used_directory, m)
        for m in PROC
        if m[1] != "_mappings" or m[2] is refuse
    ),
    *(
        (subject, asked(subject), a_run, (needs, "ask", {}))
        for subject in ("target", "data", "start", "disk space")
    ),
]
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")


def broken(patch, where, name, sees):
    if sees is NOTHING:
        patch.setattr(where, name, {})
    else:
        patch.setattr(where, name, sees if callable(sees) else lambda *_, **__: sees)


HARMLESS_SCENES = {"settings", "limits", "memory", "target", "data", "start", "disk space"}
NAMES = list(dict.fromkeys(row[0] for row in MUTANTS))


def survivors(stage, name):
    """The mutants of one scene under which the check still says that all is well."""
    for number, (_, check, scene, mutant) in enumerate(row for row in MUTANTS if row[0] == name):
        stage.tmp = stage.tmp.parent / f"{stage.tmp.name}-{number}"
        stage.tmp.mkdir()
        with scene(stage) as look:
            if name not in HARMLESS_SCENES:
                assert check(look()).status is Status.PROBLEM
            with pytest.MonkeyPatch.context() as patch:
                broken(patch, *mutant)
                if check(look()).status is Status.OK:
                    yield f"{mutant[0].__name__}.{mutant[1]}"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[needs_tmux] * (n == "tmux session")) for n in NAMES]
)
def test_a_check_that_sees_nothing_does_not_say_ok(seen, tmp_path, segment, monkeypatch, name):
    """The numbers are shown with -rP."""
    from dflash.config import TrainConfig

    def run(**sections):
        """In the stage's own directory."""
        nested = {
            "model": {"target-model": "target"},
            "data": {"data-dir": "data"},
            "run": {"output-dir": str(stage.tmp / "out")},
            **sections,
        }
        nested.setdefault("devices", {"target-gpus": "cpu", "drafter-gpus": "cpu"})
        return Run(TrainConfig.from_dict(nested), stage.tmp / "out", None)

    stage = Stage(seen, run, tmp_path, segment, monkeypatch)
    alive = list(survivors(stage, name))
    count = sum(row[0] == name for row in MUTANTS)
    print(f"{name:<16}  {count} mutants, {count - len(alive)} caught")
    assert not alive


def test_without_its_control_a_check_would_say_ok(seen, tmp_path, segment, monkeypatch):
    """The control: that these tests can fail."""
    stage = Stage(seen, None, tmp_path, segment, monkeypatch)
    monkeypatch.setattr(processes, "_why_blind", lambda _: "")
    assert list(survivors(stage, "holder, open")) != []


def test_every_check_has_a_mutant():
    checked = {row[1] for row in MUTANTS}
    assert set(checks.CHECKS) - checked == {leftovers.visibility}  # the control of all of them
