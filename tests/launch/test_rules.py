"""Every rule on its own documentation: the wrong launch is found, the right one is clean."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnostics.launch.check import Report, check
from diagnostics.launch.rules import RULES
from diagnostics.launch.shell import Source

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def taken(world: Path) -> Iterator[None]:
    """A session `taken` on what is this test's default server."""
    subprocess.run(["tmux", "new-session", "-d", "-s", "taken", "cat"], check=True, timeout=30)
    yield
    subprocess.run(["tmux", "kill-server"], check=False, timeout=30)


def look(launch: str, world: Path) -> Report:
    text = launch.replace("/workspace", str(world / "workspace"))
    return check(Source("command line", text))


def codes(report: Report) -> list[str]:
    return [finding.rule.code for finding in report.findings]


def without_mounts() -> str:
    """Why a file system of one's own cannot be had here; empty if it can."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


NEEDS_MOUNTS = {"DL003"}


@pytest.mark.parametrize("code", [code for code in RULES if code not in NEEDS_MOUNTS])
def test_the_wrong_launch_is_found(code: str, world: Path, request: pytest.FixtureRequest) -> None:
    if code == "DL020":
        request.getfixturevalue("taken")
    assert code in codes(look(RULES[code].wrong, world))


@pytest.mark.parametrize("code", RULES)
def test_the_right_launch_is_clean(code: str, world: Path, request: pytest.FixtureRequest) -> None:
    if code == "DL020":
        request.getfixturevalue("taken")
    assert codes(look(RULES[code].right, world)) == []


@pytest.mark.parametrize("code", RULES)
def test_a_page_is_complete(code: str) -> None:
    rule = RULES[code]
    assert rule.code == code
    assert rule.wrong != rule.right
    assert rule.why.endswith(".") and rule.ignore.endswith(".")
    assert not rule.title.endswith(".") and len(rule.title) < 60


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("size=64k", "DL003 loses the tail"),
        ("ro", "is on a file system that is mounted read-only"),
        ("size=64m", "ok: nothing found"),
    ],
)
def test_the_state_of_the_file_system_is_found(options: str, found: str, world: Path) -> None:
    if why := without_mounts():
        pytest.skip(f"no file system of its own: {why}")
    (world / "full").mkdir()
    script = (
        f"mount -t tmpfs -o {options} none full && "
        f"exec {sys.executable} -m diagnostics launch-check -- '{RULES['DL003'].wrong}'"
    )
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert found in " ".join(done.stdout.split()), done.stdout + done.stderr


CHECK_AS_NOBODY = """
import os, sys
from diagnostics.launch.check import check
from diagnostics.launch.shell import Source
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
report = check(Source("command line", sys.argv[1]))
for finding in (*report.findings, *report.unknown):
    print("unknown " * finding.hit.unknown + finding.rule.code, finding.hit.what)
"""


@pytest.mark.parametrize(
    ("log", "mode", "what"),
    [
        ("closed/train.log", 0o555, "DL002 you may not make files in"),
        ("open/old.log", 0o444, "DL002 you may not write to"),
    ],
)
def test_what_may_not_be_written_is_found(log: str, mode: int, what: str) -> None:
    """As a user without privileges: root may write anywhere, and this would pass unseen."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # pytest's own directories are closed to other users
        path = Path(directory, log)
        path.parent.mkdir()
        path.parent.chmod(0o755)  # whatever the umask
        if path.name == "old.log":
            path.write_text("")
        guarded = path if path.exists() else path.parent
        guarded.chmod(0o777)
        assert "DL002" not in as_nobody(path)
        guarded.chmod(mode)
        assert what in as_nobody(path)


def test_what_may_not_be_looked_at_is_unknown() -> None:
    """It may be there or not: neither is said."""
    with tempfile.TemporaryDirectory() as directory:
        closed, log = Path(directory, "closed"), Path(directory, "closed", "logs", "train.log")
        log.parent.mkdir(parents=True)
        for folder, mode in ((directory, 0o755), (closed, 0o600)):
            os.chmod(folder, mode)
        said = as_nobody(log, program=str(closed / "train.py"))
        assert f"unknown DL001 {log.parent} on this machine cannot be looked at" in said
        assert f"unknown DL031 you may not look whether there is a {closed}/train.py" in said
        closed.chmod(0o755)
        said = as_nobody(log, program=str(closed / "train.py"))
        assert "DL001" not in said
        assert f"DL031 there is no {closed}/train.py" in said


def as_nobody(log: Path, program: str = "train.py") -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHECK_AS_NOBODY, f"python -u {program} >> {log} 2>&1"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": "/"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
