"""What is offered instead of a launch is run, beside the launch: it keeps what that loses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diagnostics.launch.check import check
from diagnostics.launch.shell import Source

DIES = """
import os, sys
print("step 1")
print("the reason", file=sys.stderr)
os._exit(3)
"""

# What the launch as it is loses: `tail` (standard output), `reason` (standard error), `status`.
LAUNCHES = [
    ("python train.py > a.log 2>&1", {"tail"}),
    ("python train.py > a.log", {"tail", "reason"}),
    ("python train.py 2>&1 > a.log", {"tail", "reason"}),
    ("PYTHONUNBUFFERED=0 python train.py > a.log 2>&1", {"tail"}),
    ("export PYTHONBUFFERED=1; python train.py > a.log 2>&1", {"tail"}),
    ("PYTHONUNBUFFERED=1\npython train.py > a.log 2>&1", {"tail"}),
    ("stdbuf -oL python train.py > a.log 2>&1", {"tail"}),
    ("python -u train.py 2>&1 | tee a.log", {"status"}),
    ("python train.py | tee a.log", {"tail", "reason", "status"}),
    ("python -u train.py > logs/a.log 2>&1", {"tail", "reason", "status"}),
    ("D=logs; python -u train.py > $D/a.log 2>&1", {"tail", "reason", "status"}),
    ("set -o pipefail; python -u train.py 2>&1 | tee logs/a.log", {"tail", "reason", "status"}),
    ("bash -c 'python train.py | tee a.log'", {"tail", "reason", "status"}),
    ("sh -c 'python train.py &> a.log; exit $?'", {"tail", "reason", "status"}),
]


@pytest.fixture
def dying(world: Path) -> Path:
    """`python` is this Python, and train.py dies without flushing."""
    (world / "train.py").write_text(DIES)
    (world / "bin" / "python").unlink()
    (world / "bin" / "python").symlink_to(sys.executable)
    return world


def lost(launch: str, world: Path) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", launch],
        capture_output=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    kept = "".join(log.read_text() for log in world.rglob("a.log"))
    found = {"tail": "step 1" in kept, "reason": "the reason" in kept}
    return {name for name, there in found.items() if not there} | (
        {"status"} if done.returncode != 3 else set()
    )


@pytest.mark.parametrize(("launch", "loses"), LAUNCHES, ids=[text for text, _ in LAUNCHES])
def test_it_keeps_what_the_launch_loses(launch: str, loses: set[str], dying: Path) -> None:
    report = check(Source("command line", launch))
    mended = report.mended or next(f.mended for f in report.findings if f.mended)
    assert lost(launch, dying) >= loses
    for log in dying.rglob("a.log"):
        log.unlink()
    assert lost(mended, dying) == set(), mended


def test_appending_keeps_the_log_of_the_run_before(dying: Path) -> None:
    launch = "python -u train.py > a.log 2>&1"
    (finding,) = check(Source("command line", launch)).findings
    for text, kept in ((launch, False), (finding.mended, True)):
        (dying / "a.log").write_text("the run before\n")
        lost(text, dying)
        assert ("the run before" in (dying / "a.log").read_text()) == kept


TERMINATES_ITS_SCRIPT = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
script = int(os.environ["SCRIPT"])
os.kill(script, signal.SIGTERM)
end = time.monotonic() + 30
while os.getppid() == script and time.monotonic() < end:
    pass
print("alone" if os.getppid() != script else "not terminated")
"""


def test_exec_passes_sigterm_on(dying: Path) -> None:
    """Without it the script's shell dies of the signal, and the trainer runs on alone."""
    (dying / "train.py").write_text(TERMINATES_ITS_SCRIPT)
    (dying / "go.sh").write_text("export SCRIPT=$$\npython -u train.py\n")
    (finding,) = check(Source("command line", "bash go.sh")).findings
    assert finding.mended == "exec python -u train.py"
    ended = []
    for line in ("python -u train.py\ntrue", finding.mended):
        (dying / "go.sh").write_text(f"export SCRIPT=$$\n{line}\n")
        # Returns when the trainer has ended, which holds the pipe.
        done = subprocess.run(["bash", "go.sh"], stdout=subprocess.PIPE, timeout=60)
        ended.append((done.returncode, done.stdout.decode().strip()))
    assert ended == [(-15, "alone"), (7, "")]
