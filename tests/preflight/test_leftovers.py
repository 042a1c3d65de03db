"""Every kind of leftover made on purpose and found, beside a harmless one that is not."""

import mmap
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from diagnostics import processes
from diagnostics.preflight import leftovers
from diagnostics.verdict import Status
from tests.preflight.leftovers_made import DELETED, HOLD, ORPHAN, READY, SEGMENT, ZOMBIE, child

SECRET = ("--api-key", "abc123secret")
HARMLESS = "import sys" + READY


def stand_in(device):
    return re.compile(re.escape(str(device)))


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_process_that_holds_a_gpu(seen, device, how):
    with child(HOLD + READY, device, how, *SECRET) as (process, _), child(HARMLESS) as (other, _):
        line = leftovers.gpu_holders(seen(process.pid, other.pid, gpu=stand_in(device)))
        clean = leftovers.gpu_holders(seen(other.pid, gpu=stand_in(device)))
    assert (line.status, clean.status) == (Status.PROBLEM, Status.OK)
    assert [culprit.process.pid for culprit in line.culprits] == [process.pid]
    assert line.culprits[0].does == f"holds {device}"
    assert "abc123secret" not in str(line)


def test_a_dead_process_whose_threads_live_and_hold_a_gpu(seen, device):
    """ps shows it as <defunct>, its own descriptors are closed; its threads' are not."""
    with child(ZOMBIE, device) as (process, said):
        now = seen(process.pid, gpu=stand_in(device))
        assert said == str(process.pid)
        assert os.listdir(f"/proc/{said}/task")
        dead, holding = leftovers.zombie_leaders(now), leftovers.gpu_holders(now)
    assert (dead.status, holding.status) == (Status.PROBLEM, Status.PROBLEM)
    assert "1 thread(s) live on" in dead.culprits[0].does
    assert sys.executable in dead.culprits[0].process.words


def test_a_dead_process_without_threads_holds_nothing(seen):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert leftovers.zombie_leaders(seen(process.pid)).status is Status.OK


@pytest.mark.parametrize("sign", ["command line", "environment"])
def test_a_worker_without_its_parent(seen, sign):
    words = ("--multiprocessing-fork",) if sign == "command line" else ()
    more = {"TORCHELASTIC_RUN_ID": "1"} if sign == "environment" else {}
    with child(ORPHAN, *words, env={**os.environ, **more}) as (_, orphan):
        line = leftovers.orphans(seen(orphan))
    assert line.status is Status.PROBLEM
    assert [culprit.process.pid for culprit in line.culprits] == [int(orphan)]


def test_a_worker_with_its_parent_and_a_service_are_no_orphans(seen):
    with (
        child(HARMLESS, "--multiprocessing-fork") as (worker, _),
        child(ORPHAN, env={"PATH": "/bin"}) as (_, service),
    ):
        assert leftovers.orphans(seen(worker.pid, service)).status is Status.OK


def test_a_launch_that_has_no_parent_and_only_mentions_workers_is_no_orphan(seen):
    words = ("train_multiprocessing.py", "--start-method=multiprocessing_spawn")
    with child(ORPHAN, *words, env={"PATH": "/bin"}) as (_, launch):
        assert leftovers.orphans(seen(launch)).status is Status.OK


INDUCTOR = "/site-packages/torch/_inductor/compile_worker/__main__.py"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (("-c", "from multiprocessing.spawn import spawn_main; spawn_main()"), True),
        (("-Es", "-c", "from multiprocessing.resource_tracker import main; main(4)"), True),
        (("-Bc", "from multiprocessing.forkserver import main"), True),
        (("worker.py", "--multiprocessing-fork"), True),
        ((INDUCTOR, "--kind=fork", "--workers=8"), True),
        (("-X", "dev", "-m", "torch._inductor.compile_worker", "--kind=fork"), True),
        (("train_multiprocessing.py",), False),
        (("train.py", "--start-method=multiprocessing_spawn"), False),
        (("train.py", "--no-multiprocessing-fork"), False),
        (("train.py", "-c", "from multiprocessing.yaml"), False),
        (("-c", "import multiprocessing; print(multiprocessing.cpu_count())"), False),
        (("-m", "compile_worker_bench"), False),
        (("-m", "lint", INDUCTOR), False),
    ],
)
def test_a_worker_is_told_by_what_python_was_asked_to_run(line, expected):
    assert processes.is_worker(("/usr/bin/python3", *line), {}) is expected


def test_an_orphan_that_names_the_output_directory_is_this_runs(seen, run, tmp_path):
    words = ("--multiprocessing-fork", "--output-dir", "out")
    with child(ORPHAN, *words, cwd=tmp_path) as (_, orphan):
        whose = [leftovers.orphans(seen(orphan, run=r)).culprits[0].whose for r in (run(), None)]
    assert whose == ["this run's", "yours"]


def test_a_log_that_was_deleted_under_its_writer(seen, tmp_path):
    log = tmp_path / "train.log"
    with child(DELETED, log) as (process, _):
        line = leftovers.deleted_outputs(seen(process.pid))
    assert line.status is Status.PROBLEM
    assert f"writes into {log}, which is deleted" in str(line)


def test_an_output_that_never_had_a_name_or_still_has_one_is_fine(seen, tmp_path):
    code = "import os, sys, tempfile\nfile = {}\nready = os.dup(1)\nos.dup2(file.fileno(), 1)\n"
    code += "os.write(ready, b'ready\\n')\nsys.stdin.read(1)"
    for made in ("tempfile.TemporaryFile()", f"open({str(tmp_path / 'log')!r}, 'w')"):
        with child(code.format(made)) as (process, _):
            assert leftovers.deleted_outputs(seen(process.pid)).status is Status.OK


def shared(now, segment):
    """What the check says of one entry; others are another test's, or somebody's."""
    line = leftovers.shared_memory(now)
    return line if segment.name in str(line) else None


def test_a_segment_that_nobody_maps_any_more(everybody, segment):
    with child(SEGMENT + READY, segment) as (process, _):
        assert shared(everybody(), segment) is None
        process.kill()
        process.wait()
        line = shared(everybody(), segment)
    assert line.status is Status.PROBLEM
    assert "nobody maps" in line.said


def test_a_segment_that_the_caller_maps_is_in_use(everybody, segment):
    segment.write_bytes(b"x")
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 1):
        assert shared(everybody(), segment) is None
    assert shared(everybody(), segment).status is Status.PROBLEM


def test_a_caller_that_holds_a_gpu_is_named_and_never_offered(device):
    """A notebook, for instance."""
    code = (
        "import re, sys\n"
        "from diagnostics import processes\n"
        "from diagnostics.preflight import leftovers, line\n"
        "seen = line.Seen(processes.look(), gpu=re.compile(re.escape(sys.argv[1])))\n"
        "found = leftovers.gpu_holders(seen)\n"
        "print(found.said, len(found.culprits), found.remedy, sep='|')"
    )
    with device.open("rb"):
        done = subprocess.run(
            [sys.executable, "-c", code, device], capture_output=True, text=True, timeout=60
        )
    said, culprits, remedy = done.stdout.split("|")
    assert (said, culprits) == (f"1 process(es): {os.getpid()}", "0")
    assert "by hand" in remedy


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_model_that_is_kept_there_is_no_residue(everybody, segment, kind):
    kept = segment.with_name(f"{segment.name.replace('psm_', 'model_')}.safetensors")
    kept.mkdir() if kind == "directory" else kept.touch()
    try:
        line = leftovers.shared_memory(everybody())
        assert kept.name in next(d for d in line.details if d.startswith("kept on purpose"))
        assert str(kept) not in line.remedy
    finally:
        kept.rmdir() if kind == "directory" else kept.unlink()


def test_a_segment_of_a_process_that_cannot_be_seen_is_unknown(everybody, segment):
    segment.touch()
    now = everybody()
    hidden = replace(now.table.processes[0], is_readable=False, maps=(), links=())
    partly = replace(now.table, processes=(*now.table.processes, hidden))
    assert shared(replace(now, table=partly), segment).status is Status.UNKNOWN


@pytest.mark.gpu
def test_a_process_with_a_context_on_the_gpu_is_found(seen):
    code = "import sys, torch; torch.ones(1, device='cuda')" + READY
    with child(code) as (process, _):
        assert leftovers.gpu_holders(seen(process.pid)).status is Status.PROBLEM
