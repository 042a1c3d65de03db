"""`dflash-diag launch`: real launches, in tmux and without it, and refused ones."""

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from diagnostics.cli import main
from diagnostics.launch import family, journal, launcher, onsite, status, supervisor
from diagnostics.verdict import Status
from tests.launch.launching import (
    PYTHON,
    SETSID_WORKER,
    STAY,
    TELL,
    WITHIN_S,
    end,
    launch,
    stages,
)

IN_TMUX = pytest.param(
    True, id="tmux", marks=pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
)
MANNERS = [IN_TMUX, pytest.param(False, id="setsid")]
DEATHS = {
    "raises": ("print('step 1')\nraise RuntimeError('boom')", "launch-exited", "exited 1"),
    "exits": ("import sys\nprint('step 1')\nsys.exit(3)", "launch-exited", "exited 3"),
    "_exit": ("import os\nprint('step 1')\nos._exit(4)", "launch-exited", "exited 4"),
    "killed": ("import os\nprint('step 1')\nos.kill(os.getpid(), 9)", "launch-killed", "SIGKILL"),
    "crashes": ("import os\nprint('step 1')\nos.abort()", "launch-killed", "SIGABRT"),
}


def log_of(work):
    return (work / "train.log").read_text()


@pytest.mark.parametrize("tmux", MANNERS)
@pytest.mark.parametrize("death", DEATHS)
def test_a_death_is_told_with_its_last_lines(desk, tmux, death):
    """Lines that the program does not flush: only unbuffered, they survive _exit and signals."""
    code, expected, words = DEATHS[death]
    verdict = launch(code, tmux=tmux, ends=True)
    assert (verdict.status, verdict.code) == (Status.PROBLEM, expected)
    assert words in verdict.summary
    assert verdict.evidence["last lines"].startswith("step 1")
    assert ("RuntimeError: boom" in log_of(desk)) == (death == "raises")


def test_control_without_the_launcher_the_line_is_lost(desk):
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open(desk / "train.log", "w") as log:
        subprocess.run([*PYTHON, DEATHS["killed"][0]], stdout=log, env=plain, timeout=WITHIN_S)
    assert log_of(desk) == ""


@pytest.mark.parametrize("tmux", MANNERS)
def test_it_returns_at_the_first_line_and_writes_down_every_stage(desk, tmux):
    verdict = launch(STAY, tmux=tmux)
    assert (verdict.status, verdict.code) == (Status.OK, "launch-running")
    run = stages()
    assert list(run) == ["client", "supervisor", "redirect", "exec", "first_line"]
    opened = os.stat(desk / "train.log")
    assert run["redirect"]["device"] == f"{os.major(opened.st_dev)}:{os.minor(opened.st_dev)}"
    assert run["redirect"]["inode"] == opened.st_ino
    assert run["exec"]["start_ticks"] == onsite.identity(run["exec"]["pid"])["start_ticks"]
    assert run["exec"]["boot_id"] == onsite.boot_id()
    assert os.readlink(f"/proc/{run['exec']['pid']}/fd/1") == str(desk / "train.log")


def test_it_returns_at_an_end_without_a_line(desk):
    assert launch("raise SystemExit(3)").summary.startswith("train exited 3")


def test_success_is_told_too_and_the_name_is_free_again(desk):
    assert launch("pass").summary.startswith("train exited 0")
    assert launch("print('step 1')", log="second.log").status is Status.OK


def test_silence_is_told_after_the_limit_and_is_not_success(desk):
    verdict = launch("import signal; signal.pause()", patience_s=0.2)
    assert (verdict.status, verdict.code) == (Status.UNKNOWN, "launch-silent")


def test_a_program_that_cannot_be_started_is_told_from_one_that_dies(desk):
    (desk / "train").write_text("no program")
    (desk / "train").chmod(0o755)
    verdict = launch(("./train",))
    assert verdict.code == "launch-no-exec"
    assert "cannot start ./train: [Errno 8]" in log_of(desk)


def test_a_worker_that_outlives_the_trainer_is_named(desk):
    """In a session of its own, as torchrun's workers are."""
    verdict = launch(SETSID_WORKER, ends=True)
    (worker,) = stages()["exit"]["left"]
    assert f"still running of it: {worker['pid']}" in verdict.summary
    os.kill(worker["pid"], signal.SIGKILL)
    assert family.wait_until(lambda: not onsite.is_alive(worker), WITHIN_S)
    assert "still running" not in status.probe("train").summary


@pytest.mark.parametrize("tmux", MANNERS)
def test_signals_to_the_supervisor_reach_the_trainer(desk, tmux):
    launch(TELL, tmux=tmux)
    for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
        number = getattr(signal, f"SIG{name}")
        end("supervisor", number)
        assert family.wait_until(lambda n=number: f"got {n}\n" in log_of(desk), WITHIN_S)


# What is refused, before anything is written.


def refused(code, **wish):
    verdict = launch(STAY, **wish)
    assert (verdict.status, verdict.code) == (Status.PROBLEM, f"launch-{code}")
    return verdict


def test_a_log_is_never_overwritten(desk):
    (desk / "train.log").write_text("the record of the crash")
    refused("log-exists")
    assert log_of(desk) == "the record of the crash"
    (desk / "dangling.log").symlink_to("nowhere")
    refused("log-exists", log="dangling.log")
    assert journal.names() == []


def test_nor_is_one_that_is_made_after_the_check(desk, monkeypatch):
    log = desk / "train.log"
    log.write_text("another's")
    monkeypatch.setattr(onsite, "check", lambda asked: {"log": str(log), "wrong": []})
    verdict = launch(STAY)
    assert verdict.code == "launch-no-redirect" and "File exists" in verdict.summary
    assert log.read_text() == "another's"


def test_a_live_name_is_not_taken(desk):
    launch(STAY)
    before = stages()
    refused("name-live", log="other.log")
    assert stages() == before and not (desk / "other.log").exists()


def test_of_two_clients_at_once_one_launches(desk):
    verdicts = []
    clients = [
        threading.Thread(target=lambda log=log: verdicts.append(launch(STAY, log=log)))
        for log in ("a.log", "b.log")
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(WITHIN_S)
    assert sorted(v.code for v in verdicts) == ["launch-name-live", "launch-running"]
    assert len(list(desk.glob("*.log"))) == 1


def test_a_client_decides_while_no_other_does(desk):
    """It waits for the journal, and sees what the other one wrote meanwhile."""
    path = journal.journal_of("train")
    path.parent.mkdir(parents=True)
    verdicts = []
    client = threading.Thread(target=lambda: verdicts.append(launch(STAY)))
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        client.start()
        waits = f":{os.fstat(file.fileno()).st_ino} "

        def is_waited_for():
            locks = Path("/proc/locks").read_text().splitlines()
            return any("->" in line and waits in line for line in locks) or not client.is_alive()

        assert family.wait_until(is_waited_for, WITHIN_S)
        other = {"command": "other", "log": "other.log", "manner": "", "prefix": [], "python": ""}
        process = onsite.identity(os.getpid())
        journal.append(path, {"run": "other", "stage": "client", "time_s": 0, **other, **process})
    client.join(WITHIN_S)
    assert [verdict.code for verdict in verdicts] == ["launch-name-live"]


def test_a_supervisor_whose_name_was_taken_meanwhile_starts_nothing(desk):
    path = journal.journal_of("train")
    path.parent.mkdir(parents=True)
    for run in ("first", "second"):
        journal.append(path, {"run": run, "stage": "client"})
    assert supervisor.beside(spec_of("first", path)) == onsite.NOT_STARTED
    assert [r["stage"] for r in journal.records(path)] == ["client", "client", "superseded"]


def test_nor_does_one_that_comes_after_its_client_gave_up(desk):
    path = journal.journal_of("train")
    path.parent.mkdir(parents=True)
    for stage in ("client", "failed"):
        journal.append(path, {"run": "late", "stage": stage})
    assert supervisor.beside(spec_of("late", path)) == onsite.NOT_STARTED


def spec_of(run, path):
    spec = path.with_name(f"{run}.json")
    spec.write_text(json.dumps({"run": run, "journal": str(path)}))
    return str(spec)


@pytest.mark.parametrize(
    ("code", "wish"),
    [
        ("directory-missing", {"log": "missing/train.log"}),
        ("program-missing", {"command": ("no-such-program",)}),
        ("script-missing", {"command": ("python3", "-u", "no-such-script.py")}),
    ],
)
def test_what_is_not_there_is_said_in_front(desk, code, wish):
    wanted = {"name": "train", "command": PYTHON, "log": "train.log", **wish}
    verdict = launcher.probe(launcher.Wish(**wanted), show=lambda line: None)
    assert verdict.code == f"launch-{code}" and verdict.remedy
    assert list(desk.iterdir()) == []


def test_a_directory_that_may_not_be_written():
    """Looked at by a user who may not: root may always."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        log = f"{folder}/train.log"
        found = as_nobody(log) if os.getuid() == 0 else codes(log)
        assert found == "not-writable"


def codes(log):
    return ",".join(code for code, _ in onsite.obstacles(log))


def as_nobody(log):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(writing, codes(log).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return os.read(reading, 1000).decode()


def test_without_a_journal_nothing_is_started(desk, monkeypatch):
    (desk / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(desk / "file"))
    assert "XDG_STATE_HOME" in refused("no-journal").remedy
    assert [path.name for path in desk.iterdir()] == ["file"]


@pytest.mark.parametrize("tmux", MANNERS)
def test_a_supervisor_that_does_not_start_is_told(desk, tmux, monkeypatch):
    monkeypatch.setattr(launcher, "BESIDE", "import sys; sys.exit('a broken Python')")
    if tmux:  # nobody here waits for it
        monkeypatch.setattr(launcher, "START_S", 0.5)
    verdict = refused("no-supervisor", tmux=tmux)
    assert "did not start" in verdict.summary
    assert status.probe("train").code == "launch-no-supervisor"
    left = [path.name for path in journal.journal_of("train").parent.iterdir()]
    assert not [name for name in left if name.endswith(".json")]  # it has the environment in it
    if not tmux:
        assert "it ended with status 1, and said: a broken Python" in verdict.summary


@pytest.mark.parametrize("tmux", [IN_TMUX])
def test_a_tmux_session_that_is_somebodys_is_not_taken(desk, tmux):
    subprocess.run(["tmux", "new-session", "-d", "-s", "train", "cat"], check=True)
    assert "has a session train" in refused("tmux", tmux=True).summary
    subprocess.run(["tmux", "has-session", "-t", "=train"], check=True)


@pytest.mark.parametrize("tmux", [IN_TMUX])
@pytest.mark.parametrize("option", ["destroy-unattached", "exit-unattached"])
def test_a_tmux_that_would_end_it_at_once_is_not_taken(desk, tmux, option):
    subprocess.run(["tmux", "-f", "/dev/null", "new-session", "-d", "cat"], check=True)
    subprocess.run(["tmux", "set", "-g", "exit-empty", "off", ";", "set", "-g", option, "on"])
    assert option in refused("tmux", tmux=True).summary


@pytest.mark.parametrize("tmux", [IN_TMUX])
def test_its_own_dead_session_makes_room(desk, tmux):
    launch("raise SystemExit(3)", tmux=True)
    assert launch(STAY, tmux=True, log="again.log").code == "launch-running"


# Text from the user is never a shell's.


def test_the_command_and_the_log_are_taken_as_they_are(desk):
    words = ("a b", "$(touch pwned)", "'; touch pwned; '", '"', "*", "{time}", "two\nlines", "")
    log = "$(touch pwned); x'y.log"
    code = "import sys\nprint(sys.argv[1:])"
    verdict = launch((*PYTHON, code, *words), log=log, ends=True)
    assert verdict.code == "launch-exited"
    assert (desk / log).read_text() == f"{list(words)}\n"
    assert [path.name for path in desk.iterdir()] == [log]


@pytest.mark.parametrize("tmux", MANNERS)
def test_it_runs_in_the_clients_environment_which_is_left_nowhere(desk, tmux, monkeypatch):
    """A tmux server that runs already has an older one; a key does not stay on the disk."""
    if tmux:
        subprocess.run(["tmux", "new-session", "-d", "-s", "earlier", "cat"], check=True)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    code = "import os\nprint(os.environ['WANDB_API_KEY'][::-1], os.environ['PYTHONUNBUFFERED'])"
    launch((*PYTHON, code, "--api-key", "s3cr3t-value"), tmux=tmux, ends=True)
    assert log_of(desk) == "fedcba9876543210 1\n"
    files = [path for path in journal.state_dir().rglob("*") if path.is_file()]
    assert files and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    written = "".join(path.read_text() for path in files)
    assert "0123456789abcdef" not in written and "s3cr3t-value" not in written


# The command.


def dflash_diag(*words):
    command = [sys.executable, "-m", "diagnostics", *words]
    env = {**os.environ, "PYTHONPATH": str(launcher.ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_as_a_user_types_it(desk):
    (desk / "runs").mkdir()
    options = ("--name", "night", "--log", "runs/{name}-{time}.log", "--junit", "report.xml")
    ended = dflash_diag("launch", *options, "--", *PYTHON, "raise SystemExit(3)")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("problem: night exited 3")
    assert [path.name[:6] for path in (desk / "runs").iterdir()] == ["night-"]
    assert 'failures="1"' in (desk / "report.xml").read_text()
    again = dflash_diag("launch", "status", "night", "--json")
    assert again.returncode == 1 and '"code": "launch-exited"' in again.stdout
    assert dflash_diag("launch", "status").stdout.startswith("night exited 3")
    launch("print('step 1')", name="day", ends=True)
    assert dflash_diag("launch", "status", "day").stdout.endswith("\n\n  | step 1\n")


def test_all_launches_as_json(desk):
    """By name, each with what `status NAME --json` has; where nothing was launched, none."""
    assert json.loads(dflash_diag("launch", "status", "--json").stdout) == {}
    launch("raise SystemExit(3)", name="night", ends=True)
    launch("print('step 1')\nprint('step 2')", name="day", log="day.log", ends=True)
    answer = dflash_diag("launch", "status", "--json", "--lines", "1")
    found = json.loads(answer.stdout)
    assert (answer.returncode, [*found]) == (1, ["day", "night"])
    for name, verdict in found.items():
        alone = dflash_diag("launch", "status", name, "--json", "--lines", "1")
        assert verdict == json.loads(alone.stdout)
    assert found["day"]["evidence"]["last lines"] == "step 2"


@pytest.mark.parametrize(
    "words",
    [
        ("--name", "a.b", "--log", "x", "--", "true"),
        ("--name", "../x", "--log", "x", "--", "true"),
        ("--name", "x", "--log", "{nam}", "--", "true"),
        ("--name", "x", "--log", "x", "--exec-in", "ssh 'host", "--", "true"),
        ("--name", "x", "--log", "x"),
        ("status", "nobody"),
        ("status", "--junit", "report.xml"),
    ],
)
def test_usage_errors(desk, words):
    from click.testing import CliRunner

    ended = CliRunner().invoke(main, ["launch", *words])
    assert ended.exit_code == 2, ended.output
    assert journal.names() == [] and list(desk.iterdir()) == []
