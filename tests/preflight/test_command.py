"""The command as its user types it, in a world of its own: other processes, /proc and /dev/shm."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from diagnostics.cli import main

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a world of its own takes root")
without_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")), reason="the GPUs of such a world are the machine's"
)
# Process 1 of the world is a shell, the deleted log its child's.
DIRTY = "exec 3> train.log; tail -f /dev/null >&3 3>&- & exec 3>&-; rm train.log; "


def world(tmp_path, line, **options):
    """Types a line there. `$DIAG` is the command."""
    diag = f"{sys.executable} -m diagnostics"
    inside = f"mount -t tmpfs none /dev/shm; cd {tmp_path}; {line}; exit $?"
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", inside]
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    variables = {"DIAG": diag, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    env = {k: v for k, v in os.environ.items() if k != "MASTER_PORT"} | variables
    return subprocess.run(command, env=env, timeout=60, **options)


@needs_root
@without_gpu
def test_a_clean_world_is_ok_and_a_dirty_one_is_not(tmp_path):
    clean = world(tmp_path, "$DIAG preflight --json", capture_output=True, text=True)
    assert clean.returncode == 0, clean.stdout
    assert json.loads(clean.stdout)["code"] == "preflight-clean"
    dirty = world(tmp_path, f"{DIRTY} $DIAG preflight", capture_output=True, text=True)
    assert dirty.returncode == 1
    assert "problem  deleted logs" in dirty.stdout
    assert dirty.stdout.splitlines()[-1].startswith("problem: 1 of ")


@needs_root
@without_gpu
@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"\n", 1)])
def test_fix_ends_what_it_is_told_to_and_looks_again(tmp_path, answer, code):
    master, slave = pty.openpty()
    os.write(master, answer)
    with os.fdopen(master, "rb", buffering=0) as screen:
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        done = world(tmp_path, f"{DIRTY} $DIAG preflight --fix", **ends)
        os.close(slave)
        shown = read_all(screen)
    assert done.returncode == code, shown
    assert shown.count("[y/N]") == 1
    assert f"writes into {tmp_path}/train.log, which is deleted? [y/N]" in shown
    assert ("and now:" in shown) == (code == 0)


def read_all(screen):
    shown = b""
    try:
        while part := screen.read(1 << 16):
            shown += part
    except OSError:  # how a terminal ends
        pass
    return shown.decode()


@needs_root
@pytest.mark.parametrize("hidepid", [0, 2])
def test_another_user_is_told_what_could_not_be_seen(tmp_path, hidepid):
    code = (
        "import os, sys\n"
        "from diagnostics.preflight import checks, command, run\n"
        "import dflash.errors\n"  # later it may not even read the standard library
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(command.preflight(['--json'], standalone_mode=False))"
    )
    (tmp_path / "as_nobody.py").write_text(code)
    line = f"mount -o remount,hidepid={hidepid} /proc; {DIRTY} {sys.executable} as_nobody.py"
    done = world(tmp_path, line, capture_output=True, text=True)
    assert done.stdout, done.stderr
    evidence = json.loads(done.stdout)["evidence"]
    for name in ("processes", "GPU holders", "zombie leaders", "orphans", "deleted logs"):
        assert evidence[name].startswith("unknown"), evidence
    assert "run this as root" in evidence["processes"]
    assert ("hidepid" in evidence["processes"]) == (hidepid == 2)


def test_junit_has_a_case_for_each_check(tmp_path):
    report = tmp_path / "report.xml"
    done = CliRunner().invoke(main, ["preflight", "--json", "--junit", str(report)])
    evidence = json.loads(done.stdout)["evidence"]
    cases = ElementTree.parse(report).findall("testcase")
    assert [case.get("name") for case in cases[:-1]] == list(evidence)
    assert (
        done.exit_code == {"ok": 0, "problem": 1, "unknown": 3}[json.loads(done.stdout)["status"]]
    )


def test_a_wrong_configuration_is_a_usage_error(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("[model]\nblock-size = 1\n")
    done = CliRunner().invoke(main, ["preflight", "--config", str(config)])
    assert done.exit_code == 2 and "--target-model is required" in done.output
