"""Who still holds a GPU: open files and mappings, redacted, and unknown where nobody can look."""

import os
import re
import subprocess
import sys

import pytest

from diagnostics.probes import preflight
from diagnostics.verdict import Status

HOLD = """
import mmap, sys
file = open(sys.argv[1], "r+b")
if sys.argv[2] == "mapped":
    held = mmap.mmap(file.fileno(), 1)
    file.close()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device(tmp_path):
    """A file that stands in for a GPU."""
    path = tmp_path / "nvidia0"
    path.write_bytes(b"x")
    return path


@pytest.fixture
def hold(device):
    children = []

    def start(how, **kwargs):
        command = [sys.executable, "-c", HOLD, str(device), how, "--api-key", "abc123secret"]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **kwargs
        )
        children.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait(30)


def probe(device):
    return preflight.probe(re.compile(re.escape(str(device))))


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_leftover_is_named(device, hold, how):
    child = hold(how)
    verdict = probe(device)
    assert (verdict.status, verdict.code) == (Status.PROBLEM, "gpu-held")
    assert str(child.pid) in verdict.summary
    shown = verdict.evidence[f"process {child.pid}"]
    assert f"holds {device}" in shown
    assert "abc123secret" not in shown


def test_when_it_has_gone_nothing_holds(device, hold):
    child = hold("open")
    child.kill()
    child.wait(30)
    assert probe(device).code in ("gpus-free", "gpu-holders-unreadable")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_what_cannot_be_read_is_unknown_and_never_free(device, hold):
    """As nobody, who may not look into root's processes."""
    hold("open")
    code = (
        "import os, re, sys\n"
        "from diagnostics.probes import preflight\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "verdict = preflight.probe(re.compile(re.escape(sys.argv[1])))\n"
        "print(verdict.status, verdict.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(device)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["unknown", "gpu-holders-unreadable"], done.stderr


@pytest.mark.gpu
def test_a_process_with_a_context_on_the_gpu_is_found():
    code = "import torch; torch.ones(1, device='cuda'); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "held\n"
        found, _ = preflight.holders()
        assert child.pid in [holder.pid for holder in found]
        child.kill()
