"""GPUs as a stand-in nvidia-smi or NVML tells of them, and settings that change what runs."""

import os
import re
import sys

import pytest

from diagnostics import gpus
from diagnostics.preflight import devices
from diagnostics.verdict import Status
from tests.preflight.leftovers_made import HOLD, READY, child

WAITS = "import signal; signal.pause()"
IDLE, BUSY = "0, 4, 0\n1, 4, 0\n", "0, 40213, 100\n1, 4, 0\n"
NVML = """
class NVMLError(Exception): pass
class Told:
    def __init__(self, **told): self.__dict__.update(told)
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(device): return Told(used=9 << 30)
def nvmlDeviceGetUtilizationRates(device): return Told(gpu=7)
def nvmlDeviceGetComputeRunningProcesses(device): return [Told(pid=4711)]
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A function that puts an nvidia-smi with this answer first, beside so many device files."""

    def install(answer, files=2, status=0):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\nprintf '{answer}'\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(gpus, "device_files", lambda: [f"/dev/nvidia{i}" for i in range(files)])
        monkeypatch.setattr(gpus, "ASK_NVML", "raise SystemExit(3)")

    return install


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (IDLE, Status.OK),
        (BUSY, Status.PROBLEM),
        ("0, 4, 1\n1, 4, 0\n", Status.PROBLEM),
        ("0, 4, 0\n", Status.UNKNOWN),  # of two
        ("0, [N/A], [N/A]\n1, 4, 0\n", Status.UNKNOWN),
        ("", Status.UNKNOWN),
        ("No devices were found", Status.UNKNOWN),
    ],
)
def test_what_the_driver_tells(seen, driver, answer, status):
    driver(answer.replace("\n", r"\n"))
    assert devices.gpu_memory(seen()).status is status


def test_a_driver_that_fails_is_unknown(seen, driver):
    driver(IDLE, status=9)
    assert devices.gpu_memory(seen()).status is Status.UNKNOWN


def test_a_driver_that_does_not_answer_is_unknown_and_its_child_ended(seen, driver, monkeypatch):
    driver("")
    monkeypatch.setattr(gpus, "ANSWER_S", 0.2)
    monkeypatch.setattr(gpus, "_smi", lambda: [sys.executable, "-c", WAITS])
    assert devices.gpu_memory(seen()).status is Status.UNKNOWN


def test_busy_without_a_process_is_a_finding_of_its_own(seen, driver, device):
    driver(BUSY)
    alone = devices.gpu_memory(seen())
    with child(HOLD + READY, device, "open") as (process, _):
        pattern = re.compile(re.escape(str(device)))
        held = devices.gpu_memory(seen(process.pid, gpu=pattern))
    assert (alone.status, held.status) == (Status.PROBLEM, Status.PROBLEM)
    assert "no process holds it" in alone.said and "no process" not in held.said


@pytest.mark.parametrize(("init", "code"), [("pass", 1), ("raise NVMLError", None)])
def test_nvml_is_asked_first_and_may_be_without_its_library(
    tmp_path, monkeypatch, seen, init, code
):
    (tmp_path / "pynvml.py").write_text(NVML.format(init=init))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr(gpus, "device_files", lambda: ["/dev/nvidia0"])
    line = devices.gpu_memory(seen())
    assert line.status is (Status.PROBLEM if code else Status.UNKNOWN)
    assert ("NVML names process(es) 4711" in line.details) == bool(code)


@pytest.mark.gpu(2)
def test_what_is_held_on_the_second_gpu_is_said_of_it(seen):
    code = "import sys, torch; held = torch.zeros(4 << 30, dtype=torch.int8, device='cuda:1')"
    with child(code + READY) as (process, _):
        now = seen(process.pid)
        line = devices.gpu_memory(now)
    assert line.status is Status.PROBLEM
    assert re.match(r"GPU (\d+, )*1\b.* is in use", line.said), line
    assert next(gpu.used_mib for gpu in now.gpus if gpu.index == 1) > 4 << 10


@pytest.mark.gpu(2)
def test_two_gpus_that_the_run_names_and_one_more(seen, run):
    now = seen()
    named = [f"0,{last}" for last in (1, len(now.gpus))]
    lines = [
        devices.device_numbers(seen(run=run(devices={"target-gpus": "0", "drafter-gpus": each})))
        for each in named
    ]
    assert [line.status for line in lines] == [Status.OK, Status.PROBLEM]


def test_gpus_that_the_run_names_and_the_machine_has_not(seen, run, driver):
    driver(IDLE)
    both = run(devices={"target-gpus": "0", "drafter-gpus": "1"})
    other = run(devices={"target-gpus": "0", "drafter-gpus": "7"})
    assert devices.device_numbers(seen(run=both)).status is Status.OK
    assert "cuda:7" in devices.device_numbers(seen(run=other)).said
    one = {"CUDA_VISIBLE_DEVICES": "3"}
    assert devices.device_numbers(seen(run=both, environ=one)).status is Status.PROBLEM
    assert devices.device_numbers(seen(run=run())) is None


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({"PATH": "/bin"}, Status.OK),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"},
            Status.OK,
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]"}, Status.OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments=True"}, Status.PROBLEM),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "a:b"},
            Status.PROBLEM,
        ),
        ({"CUDA_MODULE_LOADING": "LAZY"}, Status.OK),
        ({"CUDA_MODULE_LOADING": "NONE"}, Status.PROBLEM),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, Status.PROBLEM),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, Status.OK),
        ({"TORCHDYNAMO_DISABLE": "1"}, Status.PROBLEM),
        ({}, Status.UNKNOWN),
    ],
)
def test_settings(seen, environ, status):
    assert devices.settings(seen(environ=environ)).status is status
