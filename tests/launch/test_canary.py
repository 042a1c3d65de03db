"""A user's own launch with a canary in it: the trainer is never started, and nothing is touched."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest

from diagnostics.launch import canary, pool
from diagnostics.launch.deaths import DEATHS
from diagnostics.launch.rewrite import rewrite
from diagnostics.launch.scene import Plan
from diagnostics.launch.shapes import Look
from diagnostics.launch.shell import Source
from diagnostics.launch.stand_in import CannotRewrite
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status

PYTHON = str(Path(sys.executable).resolve())
TRAINER = "import pathlib, os\npathlib.Path(os.environ['WITNESS']).touch()\nprint('trained')\n"
SCRIPT = f"""#!/bin/bash
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
mkdir -p logs
exec {PYTHON} train.py --lr 6e-4
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the user types: a trainer that leaves a witness, a package, scripts, an old log."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/__main__.py", "package/__init__.py"):
        (tmp_path / name).write_text(TRAINER if "init" not in name else "")
    (tmp_path / "start.sh").write_text(SCRIPT)
    (tmp_path / "wrapper.sh").write_text(f"{PYTHON} -u train.py\necho over\n")
    (tmp_path / "train.log").write_text("of an earlier run\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WITNESS", str(tmp_path / "witness"))
    for name in ("PYTHONUNBUFFERED", "PYTHONPATH", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def probe(place, short_tmp, monkeypatch):
    """A function that probes a launch by some deaths, and makes sure that it left no trace."""

    def go(launch, *deaths):
        source = launch if isinstance(launch, Source) else Source("command line", launch)
        monkeypatch.setattr(canary, "DEATHS", {name: DEATHS[name] for name in deaths})
        shown, before = [], contents(place)
        verdict, cases = canary.probe(source, show=lambda line: shown.append(click.unstyle(line)))
        assert contents(place) == before  # no witness, no log, no directory made, the old log whole
        assert not (place / "logs").exists()
        assert list(short_tmp.iterdir()) == []
        rows = {line[:24].rstrip(): line[24:].split() for line in shown}
        return verdict, rows, {case.name: case for case in cases}

    return go


def test_the_trainer_leaves_a_witness_when_it_is_started(place):
    """The control of all the others."""
    subprocess.run(["bash", "start.sh"], check=True, capture_output=True, timeout=60)
    assert (place / "witness").exists()


@pytest.mark.parametrize(
    "launch",
    [
        f"{PYTHON} -u train.py > train.log 2>&1",
        f"{PYTHON} -E -s -u train.py >> train.log 2>&1",
        f"{PYTHON} -W ignore -um package --lr 6e-4 &> train.log",
        f"env A=1 nice {PYTHON} -u -m package > train.log 2>&1",
        f'PYTHONPATH= PYTHONUNBUFFERED=1 {PYTHON} train.py > "a name.log" 2>&1',
        f'bash -c "bash -c \'{PYTHON} -u \\"train.py\\" > train.log 2>&1\'"',
        f"P={PYTHON}; $P -u train.py > $HOME/log-$(date +%s).txt 2>&1",
    ],
)
def test_shapes_that_keep_everything(probe, launch):
    verdict, rows, cases = probe(launch, "raises", "SIGKILL")
    assert rows["raises"] == ["yes", "200/200", "yes", "1"]
    assert rows["SIGKILL"] == ["yes", "200/200", "137"]
    assert (verdict.status, verdict.code) == (Status.OK, "canary-keeps")
    assert [case.outcome for case in cases.values()] == [Outcome.ABSENT] * 2


def test_exec_against_pipe_in_ones_own_script(probe):
    """Buffered, through a script that goes to its own directory and makes another."""
    verdict, rows, _ = probe("bash start.sh > train.log 2>&1", "raises", "SIGKILL")
    assert rows["raises"] == ["yes", "200/200", "yes", "1"]
    assert rows["SIGKILL"] == ["yes", "128/200!", "137"]
    assert verdict.summary == "something is lost in 1 of 2 deaths of this launch"
    verdict, rows, cases = probe("bash start.sh 2>&1 | tee train.log", "raises", "worker lives")
    assert rows["raises"] == ["yes", "200/200", "yes", "0", "not", "1!"]
    assert rows["worker lives"] == ["yes", "128/200!", "hangs!", "1", "left", "running"]
    assert cases["raises"].reason == "exit status 1 (seen: 0)"


def test_a_script_by_its_path(probe, place):
    path = place / "start.sh"
    path.write_text(SCRIPT.replace("--lr 6e-4", "> train.log 2>&1"))
    path.chmod(0o755)
    source = Source("start.sh", path.read_text(), path)
    verdict, rows, _ = probe(source, "exit 3")
    assert rows["exit 3"] == ["yes", "200/200", "3"]
    assert verdict.status is Status.OK


def test_the_process_id_of_a_wrapper(probe):
    launch = "nohup bash wrapper.sh > train.log 2>&1 & echo $!"
    _, rows, _ = probe(launch, "hang-up", "kill printed PID")
    assert rows["hang-up"] == ["yes", "200/200", "runs", "on", "PID!"]
    assert rows["kill printed PID"] == ["yes", "200/200", "runs", "on!", "PID!"]
    written = launch.replace("echo $!", "echo $! > train.pid")
    assert probe(written, "hang-up")[1]["hang-up"][-1] == "PID!"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here")
def test_ones_own_tmux_server_is_not_met(probe, place, short_tmp, monkeypatch):
    """Not even where the session's name is taken; its configuration's settings hold."""
    home = place / "home"
    home.mkdir()
    (home / ".tmux.conf").write_text("run-shell 'touch ran'\nset -g remain-on-exit on\n")
    monkeypatch.setenv("HOME", str(home))
    env = {**os.environ, "TMUX_TMPDIR": str(short_tmp)}
    mine = ["tmux", "-f", "/dev/null", "-L", "mine"]
    subprocess.run([*mine, "new-session", "-d", "-s", "train", "cat"], env=env, check=True)
    try:
        monkeypatch.setenv("TMUX_TMPDIR", str(short_tmp))
        launch = 'tmux new-session -d -s train "bash start.sh > train.log 2>&1"'
        monkeypatch.setattr(canary, "DEATHS", {"SIGKILL": DEATHS["SIGKILL"]})
        shown = []
        verdict, _ = canary.probe(Source("command line", launch), show=shown.append)
        sessions = subprocess.run(
            [*mine, "list-sessions", "-F", "#{session_name} #{pane_current_command}"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert sessions.stdout == "train cat\n"
    finally:
        subprocess.run([*mine, "kill-server"], env=env, check=True)
        shutil.rmtree(short_tmp / f"tmux-{os.getuid()}")
    row = click.unstyle(shown[-2]).split()
    assert row == ["SIGKILL", "yes", "128/200!", "-", "not", "KILL!", "stays"]
    assert verdict.code == "canary-loses"
    assert not (place / "ran").exists()


def test_torchrun_is_run_and_its_workers_are_canaries(probe, place):
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        pytest.skip(f"no {torchrun}")
    launch = f"{torchrun} --standalone --nproc-per-node 2 train.py > train.log 2>&1"
    _, rows, _ = probe(launch, "SIGKILL")
    assert rows["SIGKILL"] == ["yes", "200/200", "1", "not", "KILL!"]


def test_what_never_starts_is_told_in_the_shells_words(probe):
    verdict, rows, _ = probe("/nowhere/python3 train.py > train.log 2>&1", "raises", "SIGKILL")
    assert verdict.code == "canary-never-starts"
    assert verdict.summary.endswith("/nowhere/python3: No such file or directory")
    assert rows["SIGKILL"] == ["yes", "0/0", "not", "started!"]


REFUSED = {
    "ssh host 'python3 train.py > train.log 2>&1'": "ssh host: it runs somewhere else",
    "pct exec 200 -- python3 train.py > train.log": "pct exec 200: it runs somewhere else",
    "docker exec c python3 train.py > train.log": "docker exec c: it runs somewhere else",
    "sudo python3 train.py > train.log 2>&1": "sudo: not known to do nothing else",
    "rm -rf out; python3 train.py > train.log": "rm: a launch may not do this",
    "kill 1; python3 train.py > train.log": "kill: a launch may not do this",
    "git pull && python3 train.py > train.log": "git: a launch may not do this",
    "pip install x; python3 train.py > train.log": "pip: a launch may not do this",
    "trap 'rm x' EXIT; python3 train.py > train.log": "trap: a launch may not do this",
    "python3 train.py > $(mktemp)": "$(mktemp): not known to do no harm",
    "python3 $(git ls-files) > train.log": "$(git ls-files): not known to do no harm",
    "tmux -S /tmp/s new -d 'python3 train.py > train.log'": "tmux -S and -f name a server",
    "tmux kill-server; python3 train.py > train.log": "tmux kill-server: not known to be private",
    "python3 $FLAGS train.py > train.log": "$FLAGS may be options or the program",
    "python3 -c 'import train' > train.log": "its program is no file",
    "python3 - < train.py > train.log": "its program is no file",
    "python3 train.py": "there is no log to look at",
    "nohup python3 train.py &": "nohup would write nohup.out here",
    "./train > train.log": "not a Python program",
    "bash missing.sh > train.log": "this script cannot be read",
    "torchrun --nnodes 2 train.py > train.log": "reaches for more than",
    "torchrun --rdzv-endpoint=h:1 train.py > train.log": "reaches for more than",
    "torchrun --log-dir logs train.py > train.log": "reaches for more than",
    "for x in $(rm y); do python3 train.py > train.log; done": "$(rm y); do python3",
    "[[ `rm y` ]] && python3 train.py > train.log": "`rm y`",
    "PROMPT_COMMAND='rm y'; python3 train.py > train.log": "a shell runs what it holds",
    "python3 train.py > train.log < /dev/tcp/host/80": "it opens a network connection",
    "/usr/bin/tee other < x; python3 train.py > train.log": "/usr/bin/tee: a launch may not",
    "nohup echo started & python3 train.py > train.log": "nohup would write nohup.out here",
    "nice mkdir made; python3 train.py > train.log": "mkdir: a launch may not do this",
    "date -s noon; python3 train.py > train.log": "date: a launch may not do this",
    "script -qO other -c 'python3 train.py' train.log": "script would write a file of its own",
    "tmux set -g default-command 'rm y' \\; new -d 'python3 train.py > l'": "tmux set default-com",
    "tmux new -d -s '#(rm y)' 'python3 train.py > train.log'": "tmux runs what stands in #(",
    "tmux new -d \\; send-keys 'rm y; python3 train.py > l' Enter": "rm: a launch may not do",
    "echo() { rm y; }; python3 train.py > train.log": "echo: a function",
    "env --split-string='rm y' A=1 python3 train.py > l": "env --split-string: not known",
    "env -vS 'rm y' python3 train.py > train.log": "env -S: not known to do nothing else",
    "env --default-signal=TERM python3 train.py > l": "env --default-signal: not known",
    "rm() { :; }; python3 train.py > $(rm)": "$(rm): not known to do no harm",
    "python3 a.py > a.log & python3 b.py > b.log": "it starts 2 trainers",
    "python3 train.py > 'train.log": "this does not parse",
}


@pytest.mark.parametrize("launch", REFUSED)
def test_what_is_not_known_to_be_safe_is_refused_by_name(launch, place, monkeypatch):
    def never(*_arguments):
        raise AssertionError("something was run")

    monkeypatch.setattr(pool, "results", never)
    before = contents(place)
    verdict, cases = canary.probe(Source("command line", launch), show=print)
    assert (verdict.status, verdict.exit_code, cases) == (Status.UNKNOWN, 3, [])
    assert REFUSED[launch] in " ".join(verdict.evidence.values()), verdict
    assert contents(place) == before


class Told(BaseException):
    pass


def told(*_):
    raise Told


@pytest.fixture
def signalled(place, short_tmp, monkeypatch):
    """A function that probes a launch while a signal comes as its directory is made or removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))

    def go(number, where):
        module, name = where
        real = getattr(module, name)
        before = signal.signal(number, told)

        def struck(*arguments, **options):
            if name == "rmtree":
                signal.raise_signal(number)
            made = real(*arguments, **options)
            if name == "mkdtemp":
                signal.raise_signal(number)
            return made

        monkeypatch.setattr(module, name, struck)
        try:
            with pytest.raises(Told):
                canary.probe(Source("command line", "python3 train.py > train.log"), show=print)
        finally:
            signal.signal(number, before)
            monkeypatch.setattr(module, name, real)
        return list(short_tmp.iterdir())

    return go


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", [(tempfile, "mkdtemp"), (shutil, "rmtree")])
def test_a_signal_leaves_no_directory_at_any_moment(number, where, signalled, monkeypatch):
    assert signalled(number, where) == []
    monkeypatch.setattr(canary, "_signals_put_off", contextlib.nullcontext)  # the control
    (left,) = signalled(number, where)
    shutil.rmtree(left)


def test_every_objection_in_a_script_is_named_with_its_line(place):
    path = place / "bad.sh"
    path.write_text(f"pip install x\n\nrm -rf out\n{PYTHON} train.py > train.log\n")
    verdict, _ = canary.probe(Source("bad.sh", path.read_text(), path), show=print)
    assert [*verdict.evidence.values()] == [
        "bad.sh, line 1: pip: a launch may not do this with a canary in it",
        "bad.sh, line 3: rm: a launch may not do this with a canary in it",
    ]


@pytest.fixture
def rewritten(place, tmp_path_factory):
    def go(launch):
        folder = tmp_path_factory.mktemp("scratch")
        plan = Plan(str(folder / "record"), 1, "print", "")
        return rewrite(Source("command line", launch), folder, plan), folder

    return go


def test_only_names_are_replaced(rewritten):
    launch = "nohup python3 -u train.py --lr 6e-4 >> logs/train.log 2>&1 & echo $! > train.pid"
    made, folder = rewritten(launch)
    expected = launch.replace("train.py", f"{folder}/canary.py")
    expected = expected.replace("logs/train.log", f"{folder}/written/0-train.log")
    expected = expected.replace("> train.pid", f"> {folder}/written/1-train.pid")
    assert made.shape.line == expected
    assert (made.log.name, made.pid_file.name) == ("0-train.log", "1-train.pid")
    assert (made.shape.look, made.shape.prints_pid) == (Look.NOWHERE, True)
    assert json.loads((folder / "plan.json").read_text())["record"] == f"{folder}/record"


def test_env_may_change_the_environment_and_nothing_else(rewritten):
    launch = "env -i -u B --chdir=. A=1 python3 -u train.py > train.log 2>&1"
    made, _ = rewritten(launch)
    assert made.shape.line.startswith(launch.partition("train.py")[0])


def test_a_copied_script_still_finds_its_own_place(rewritten, place):
    made, folder = rewritten("bash start.sh > train.log 2>&1")
    (copy,) = (folder / "scripts").iterdir()
    assert copy.read_text() == SCRIPT.replace("$0", str(place / "start.sh")).replace(
        "mkdir -p logs", "true"
    ).replace("train.py", f"{folder}/canary.py")
    assert str(copy) in made.shape.line


def test_a_console_script_keeps_its_interpreter(rewritten, place, monkeypatch):
    program = place / "dflash"
    program.write_text(f"#!{PYTHON}\n{TRAINER}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    made, folder = rewritten("dflash train > train.log 2>&1")
    assert f"{folder}/canary-dflash train" in made.shape.line
    first, *_ = (folder / "canary-dflash").read_text().splitlines()
    assert first == f"#!{PYTHON}"


def test_what_no_longer_reads_as_the_same_launch_is_refused(rewritten, monkeypatch):
    monkeypatch.setattr("diagnostics.launch.rewrite.applied", lambda text, _edits: text)
    with pytest.raises(CannotRewrite, match="no longer reads as the same launch"):
        rewritten("python3 train.py > train.log 2>&1")


@pytest.mark.parametrize(
    ("launch", "code", "said"),
    [
        ("ssh host 'python3 train.py > train.log'", 3, "unknown: not run with a canary"),
        (f"{PYTHON} train.py > train.log 2>&1", 1, "problem: something is lost in"),
    ],
)
def test_as_its_user_types_it(place, short_tmp, launch, code, said):
    """By every death that makes sense, and the trainer still left no witness."""
    ended = subprocess.run(
        [sys.executable, "-m", "diagnostics", "launch-check", "--canary", launch],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    assert said in ended.stdout
    assert not (place / "witness").exists()
