"""`launch-check --post-mortem`: every mechanism reproduced, and told from all the others."""

import os
import pwd
from datetime import datetime

import pytest

from diagnostics.launch.mechanisms import MECHANISMS
from diagnostics.launch.post_mortem import point_in_time
from diagnostics.verdict import Status
from tests.launch.failed_launches import (
    SCENES,
    Scene,
    deleted,
    ghost,
    leftover,
    needs_root,
    other_namespace,
    relative,
)
from tests.launch.launching import launch

EXPLAINS = {mechanism.code: mechanism.explains for mechanism in MECHANISMS}
TRACELESS = {"no-terminal", "killed-early", "nohup-race"}


@pytest.fixture
def scene(desk, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("HOME", str(desk / "home"))
    (desk / "home").mkdir()
    scene = Scene(desk)
    yield scene
    scene.end()


@pytest.mark.parametrize(
    ("act", "expected"),
    [pytest.param(*row[:2], marks=row[2], id=f"{i}-{row[1]}") for i, row in enumerate(SCENES)],
)
def test_each_mechanism_is_found_and_no_other(scene, monkeypatch, act, expected):
    monkeypatch.setenv("PATH", os.environ["PATH"])  # to be put back
    code, status, outcomes = act(scene) or scene.found()
    fitting = {name for name, outcome in outcomes.items() if outcome == "reproduced"}
    open_ = {name for name, outcome in outcomes.items() if outcome == "cannot tell"}
    assert code == expected, (fitting, open_)
    if expected == "no-trace":
        assert (status, fitting) == ("unknown", set()) and open_ >= TRACELESS
    elif expected == "log-there":
        assert (status, fitting) == ("ok", set()) and not open_ & TRACELESS
    else:
        assert (status, fitting) == ("problem", {expected})


def test_every_mechanism_has_a_scene():
    assert EXPLAINS.keys() - {row[1] for row in SCENES} == TRACELESS


def test_a_deleted_log_is_copied_back_and_nothing_is_overwritten(scene):
    deleted(scene)
    to = scene.work / "recovered.log"
    verdict, _ = scene.probe(recover=to)
    assert to.read_text() == "step 1\n"
    assert to.stat().st_mode & 0o777 == 0o600
    assert verdict.evidence["recovered"].startswith(f"7 bytes, in {to}")
    to.write_text("mine")
    with pytest.raises(FileExistsError):
        scene.probe(recover=to)
    assert to.read_text() == "mine"


@needs_root
def test_a_log_in_other_mounts_is_copied_back(scene):
    other_namespace(scene)
    scene.probe(recover=scene.work / "recovered.log")
    assert (scene.work / "recovered.log").read_text() == "step 1\n"


def test_where_nothing_is_open_nothing_is_recovered(scene):
    verdict, _ = scene.probe(recover=scene.work / "recovered.log")
    assert verdict.evidence["recovered"].startswith("nothing")
    assert not (scene.work / "recovered.log").exists()


def test_without_the_launchs_time_a_leftover_cannot_be_told(scene):
    leftover(scene)
    scene.since = None
    _, _, outcomes = scene.found()
    assert outcomes["leftover"] == "cannot tell"


def test_a_ghost_may_be_a_process_that_cannot_be_read(scene, monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"])  # to be put back
    ghost(scene)
    scene.unreadable = 1
    code, status, outcomes = scene.found()
    assert (code, status, outcomes["ghost"]) == ("no-trace", "unknown", "cannot tell")


def test_the_launchers_journal_says_when_and_how(scene):
    """Its log was deleted afterwards: the status is known all the same."""
    launch("raise SystemExit(3)", log=str(scene.log))
    scene.log.unlink()
    scene.since = None
    verdict, _ = scene.probe()
    assert verdict.evidence["launched"].startswith("since ")
    assert "launch status train: train exited 3" in verdict.evidence["journal"]


def test_incident_2_names_the_leftover_and_that_the_rest_cannot_be_known(scene):
    leftover(scene)
    verdict, _ = scene.probe()
    assert verdict.code == "post-mortem-leftover" and str(scene.gpu) in verdict.summary
    assert verdict.evidence["killed-early"].startswith("unknown")


def test_another_run_whose_log_is_called_alike_is_not_to_be_killed(scene):
    """It ran before, in another directory, and holds no GPU."""
    relative(scene)
    scene.since += 60
    code, _, outcomes = scene.found()
    assert (code, outcomes["leftover"]) == ("no-trace", "absent")
    scene.since = None
    code, _, outcomes = scene.found()
    assert (code, outcomes["relative-path"]) == ("no-trace", "cannot tell")


@pytest.mark.parametrize("where", ["$SHELL", "the password file"])
def test_a_login_shell_that_runs_nothing_matters_only_to_tmux(scene, monkeypatch, where):
    monkeypatch.setenv("SHELL", "/usr/sbin/nologin")
    if where != "$SHELL":
        monkeypatch.delenv("SHELL")
        user = pwd.getpwuid(os.getuid())
        nobody = pwd.struct_passwd((*user[:6], "/usr/sbin/nologin"))
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: nobody)
    code, _, outcomes = scene.found()
    assert (code, outcomes["shell-runs-nothing"]) == ("no-trace", "cannot tell")
    scene.session = "train"
    assert scene.found()[0] == "shell-runs-nothing"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-30 00:10", "2026-11-30T00:10:00"),
        ("2026-11-30T00:10:05", "2026-11-30T00:10:05"),
        ("00:05", "2026-11-30T00:05:00"),
        ("23:50:01", "2026-11-29T23:50:01"),
        ("30 min ago", "2026-11-29T23:40:00"),
        ("2h", "2026-11-29T22:10:00"),
    ],
)
def test_points_in_time(text, expected):
    now = datetime(2026, 11, 30, 0, 10)
    assert point_in_time(text, now) == datetime.fromisoformat(expected).timestamp()


@pytest.mark.parametrize("text", ["yesterday", "25:00", "10", ""])
def test_what_is_no_point_in_time(text):
    with pytest.raises(ValueError):
        point_in_time(text)


@pytest.mark.parametrize(
    "words",
    [
        ("--post-mortem",),
        ("--log", "train.log"),
        ("--post-mortem", "--log", "train.log", "--since", "yesterday"),
        ("--post-mortem", "--log", "train.log", "--canary", "run.sh"),
        ("--post-mortem", "--log", "train.log", "--recover", "taken"),
    ],
)
def test_usage_errors(desk, words):
    from click.testing import CliRunner

    from diagnostics.cli import main

    (desk / "taken").write_text("mine")
    ended = CliRunner().invoke(main, ["launch-check", *words])
    assert ended.exit_code == 2, ended.output
    assert (desk / "taken").read_text() == "mine"


def test_as_a_user_types_it(scene):
    from click.testing import CliRunner

    from diagnostics.cli import main

    deleted(scene)
    words = (
        "--log",
        scene.log,
        "--since",
        "5 min ago",
        "--recover",
        "back.log",
        "--junit",
        "r.xml",
    )
    ended = CliRunner().invoke(main, ["launch-check", "--post-mortem", *map(str, words)])
    assert ended.exit_code == 1, ended.output
    assert ended.output.startswith("problem: process ") and "recovered " in ended.output
    assert (scene.work / "back.log").read_text() == "step 1\n"
    assert (scene.work / "r.xml").read_text().count("<failure") == 2  # log-deleted, the verdict
    assert Status.PROBLEM in ended.output
