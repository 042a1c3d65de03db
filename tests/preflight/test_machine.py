"""Limits, memory, clock, caches, ports and tmux: each made wrong, beside one that is right."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from diagnostics.preflight import machine
from diagnostics.verdict import Status

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")


@pytest.mark.parametrize(
    ("limit", "status"),
    [("NOFILE", "problem"), ("FSIZE", "problem"), ("AS", "problem"), ("", "ok")],
)
def test_limits_of_a_shell(limit, status):
    code = (
        "import resource, sys\n"
        "if sys.argv[1]:\n"
        "    which = getattr(resource, 'RLIMIT_' + sys.argv[1])\n"
        "    most = 1 << (40 if sys.argv[1] == 'AS' else 8)\n"
        "    resource.setrlimit(which, (most, resource.getrlimit(which)[1]))\n"
        "from diagnostics.preflight.machine import limits\n"
        "print(limits(None).status)"
    )
    done = subprocess.run([sys.executable, "-c", code, limit], capture_output=True, text=True)
    assert done.stdout.strip() == status, done.stderr


def test_huge_pages_that_nobody_uses(seen, monkeypatch):
    assert machine.memory(seen()).status is Status.OK
    real = machine._meminfo()
    pages = {"HugePages_Free": 512, "Hugepagesize": real["MemTotal"] // 1024}
    monkeypatch.setattr(machine, "_meminfo", lambda: {**real, **pages})
    line = machine.memory(seen())
    assert line.status is Status.PROBLEM and "huge pages" in line.said


def test_a_clock_behind_the_runs_files(seen, run):
    made = run()
    made.directory.mkdir()
    log = made.directory / "train.log"
    log.touch()
    assert machine.clock(seen(run=made)).status is Status.OK
    os.utime(log, (time.time() + 3600, time.time() + 3600))
    line = machine.clock(seen(run=made))
    assert line.status is Status.PROBLEM and str(log) in line.said


def test_a_clock_at_its_factory_setting(seen, monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 0.0)
    assert machine.clock(seen()).status is Status.PROBLEM


def test_a_compile_cache_that_is_private_and_others(seen, tmp_path):
    private, public = tmp_path / "private", tmp_path / "public"
    for directory in (private, public):
        directory.mkdir()
    public.chmod(0o777)

    def line(directory):
        return machine.caches(seen(environ={"TORCHINDUCTOR_CACHE_DIR": str(directory)}))

    assert line(private).status is Status.OK
    assert line(tmp_path / "to" / "be-made").status is Status.OK
    assert "everybody may write" in line(public).said
    assert line("/proc/cache").status is Status.PROBLEM


@needs_root
def test_a_compile_cache_of_another_user(seen, tmp_path):
    os.chown(tmp_path, 65534, 65534)
    line = machine.caches(seen(environ={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}))
    os.chown(tmp_path, 0, 0)
    assert "belongs to user 65534" in line.said


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_in_use(seen, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {address} here: {error}")
    with listener:
        port = listener.getsockname()[1]
        line = machine.ports(seen(ports=(port,)))
        said = machine.ports(seen(environ={"MASTER_PORT": str(port)}))
    assert (line.status, said.status) == (Status.PROBLEM, Status.PROBLEM)
    assert f"process {os.getpid()} listens" in line.details[0]


def test_ports_that_are_free_or_none(seen):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert machine.ports(seen(ports=(port,))).status is Status.OK
    assert machine.ports(seen()) is None
    assert machine.ports(seen(environ={"MASTER_PORT": "http"})).status is Status.PROBLEM


@needs_tmux
def test_a_tmux_session_of_that_name(seen, monkeypatch, tmp_path):
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    subprocess.run(["tmux", "-f", "/dev/null", "new-session", "-d", "-s", "train"], check=True)
    try:
        assert machine.tmux(seen(session="train")).status is Status.PROBLEM
        assert machine.tmux(seen(session="other")).status is Status.OK
        assert machine.tmux(seen()) is None
    finally:
        subprocess.run(["tmux", "kill-server"], check=True)
