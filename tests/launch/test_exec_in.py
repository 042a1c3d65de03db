"""`dflash-diag launch --exec-in`: what runs, is looked at and is told behind a prefix."""

import ast
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from diagnostics.launch import family, journal, onsite
from diagnostics.verdict import Status
from tests.launch.launching import (
    PYTHON,
    STAY,
    TELL,
    WITHIN_S,
    end,
    launch,
    wait_for,
)


def log_of(work):
    return (work / "train.log").read_text()


# What ssh does: its words are joined, and a shell takes them apart.
SSH = '#!/bin/sh\nshift\nexec /bin/sh -c "$*"\n'
# What leads into another root, and passes its words on as they are.
ENTERS = '#!/bin/sh\nexec env -C / -- "$@"\n'


def tool(work, name, text):
    (work / "bin").mkdir(exist_ok=True)
    path = work / "bin" / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("kind", ["ssh", "ssh twice", "env", "script"])
def test_words_arrive_behind_a_prefix_as_they_are(desk, kind):
    ssh = tool(desk, "ssh", SSH)
    prefix = {
        "ssh": (ssh, "host"),
        "ssh twice": (ssh, "host", ssh, "inner"),
        "env": ("env", "--", "A=1"),
        "script": (tool(desk, "pct", ENTERS),),
    }[kind]
    words = ("a b", "$(touch pwned)", "'; touch pwned; '", '"', "two\nlines", "")
    verdict = launch(
        (*PYTHON, "import sys\nprint(sys.argv[1:])", *words),
        prefix=prefix,
        log=str(desk / "a train.log"),
        ends=True,
    )
    assert verdict.summary.startswith("train exited 0"), verdict
    assert (desk / "a train.log").read_text() == f"{list(words)}\n"
    assert not list(desk.parent.rglob("pwned"))


@pytest.fixture
def other_root(desk):
    """A root that has the machine's programs and a /runs of its own."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another root takes root and unshare")
    root = desk / "root"
    for name in ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "root", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "runs").mkdir()
    script = f"""#!/bin/sh
mount --make-rprivate /
for each in usr bin sbin lib lib64 etc proc dev root tmp; do
  [ -e /$each ] && mount --rbind /$each {root}/$each
done
exec chroot {root} "$@"
"""
    enter = tool(desk, "enter", script)
    prefix = ("unshare", "--mount", enter)
    tried = subprocess.run([*prefix, *PYTHON, "pass"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no other root here: {tried.stderr.strip()}")
    return root, prefix


def test_paths_are_looked_at_where_the_program_runs(desk, other_root):
    """/runs is there and not here, so the log is; and the other way round."""
    root, prefix = other_root
    verdict = launch(STAY, prefix=prefix, log="/runs/train.log")
    assert verdict.code == "launch-running", verdict
    assert (root / "runs" / "train.log").read_text() == "step 1\n"
    assert verdict.evidence["last lines"] == "step 1"
    end("supervisor", signal.SIGTERM)
    assert "SIGTERM" in wait_for("launch-killed").summary
    (desk / "here").mkdir()
    wrong = launch(STAY, prefix=prefix, log="/here/train.log", name="wrong")
    assert wrong.code == "launch-directory-missing" and "behind unshare" in wrong.summary


@pytest.mark.parametrize("kind", ["env", "ssh"])
def test_signals_pass_a_prefix_that_passes_none(desk, kind):
    """A shell between that waits keeps them to itself, as ssh without a terminal does."""
    waits = tool(desk, "ssh" if kind == "ssh" else "pct", SSH.replace("exec ", "") + "exit $?\n")
    prefix = (waits, "host") if kind == "ssh" else ("env", "--")
    launch(TELL, prefix=prefix)
    end("supervisor", signal.SIGUSR1)
    assert family.wait_until(lambda: f"got {signal.SIGUSR1.value}\n" in log_of(desk), WITHIN_S)
    end("exec", signal.SIGKILL)
    assert "SIGKILL" in wait_for("launch-killed").summary


def test_the_other_side_may_have_python_3_8():
    ast.parse(Path(onsite.__file__).read_text(), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (("echo",), "ended with 0"),
        (("no-such-tool", "exec"), "No such file"),
        (("sh", "-c", "echo CT 200 not running >&2; exit 255"), "CT 200 not running"),
    ],
)
def test_a_prefix_that_leads_nowhere_could_not_be_checked(desk, prefix, said):
    verdict = launch(STAY, prefix=prefix)
    assert (verdict.status, verdict.code) == (Status.UNKNOWN, "launch-not-checked")
    assert said in verdict.summary and journal.names() == []
