"""The table of launches: what it measures on this machine, and what it makes of it."""

import os
import shutil

import click
import pytest

from diagnostics.launch import matrix, table
from diagnostics.launch.deaths import BUFFERINGS, DEATHS
from diagnostics.launch.losses import losses
from diagnostics.launch.shapes import EXEC, PIPE, SHAPES
from diagnostics.launch.store import Store
from diagnostics.launch.table import Row
from diagnostics.launch.trial import Cell, Result
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status

KEPT = Result(started=True, log=True, kept=200, written=200, last_words=True, status=1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dflash-diag"


@pytest.fixture
def few(monkeypatch, short_tmp):
    """The whole matrix is two launches by two deaths."""
    rows = (Row(EXEC, "-u"), Row(PIPE, "-u"))
    monkeypatch.setattr(matrix, "every_row", lambda: rows)
    monkeypatch.setattr(matrix, "DEATHS", {name: DEATHS[name] for name in ("raises", "SIGKILL")})


def test_the_size_of_the_matrix():
    assert len(SHAPES) >= 25
    assert len(DEATHS) >= 18
    assert len(BUFFERINGS) >= 7


def test_the_rows_and_columns_of_the_default_table_exist():
    rows = [row for group in matrix.GROUPS.values() for row in group]
    assert {row.shape for row in rows} <= set(SHAPES)
    assert {row.buffering for row in rows} <= set(BUFFERINGS)
    assert set(matrix.COLUMNS) <= set(DEATHS)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="half of the table needs tmux")
def test_the_default_table(short_tmp):
    """Exec against pipe, at a glance, in 80 columns."""
    shown = []
    verdict, cases = matrix.probe(full=False, resume=False, show=shown.append)
    lines = click.unstyle("\n".join(shown)).splitlines()
    assert max(map(len, lines[1:])) <= 80, lines
    by_title = {line[:24].rstrip(): line[24:].split() for line in lines}
    assert by_title[EXEC][:5] == ["200", "tb", "1", "128!", "137"]
    assert by_title[f"{EXEC} -u"][:5] == ["200", "tb", "1", "200", "137"]
    assert by_title[PIPE][:5] == ["200", "tb", "0!", "128!", "0!"]
    assert by_title["tmux: exec > log"][-1] == "gone"
    assert by_title["tmux: remain-on-exit -u"][-1] == "stays"
    assert lines[-2].split() == [*EXEC.split(), "8/8", "6/6", "72!", "0", "0"]
    assert lines[-1].split() == [*PIPE.split(), "8/8", "0/6!", "72!", "0", "2!"]
    assert (verdict.status, verdict.code) == (Status.PROBLEM, "shapes-lose")
    assert "nothing is lost by: tmux: status in file -u, tmux: remain-on-exit -u" in verdict.summary
    assert verdict.evidence["tmux: remain-on-exit -u"].startswith(
        "nothing lost | tmux start-server"
    )
    assert verdict.evidence[f"{PIPE} -u"].endswith(
        "| bash start.sh 2>&1 | tee train.log (start.sh: exec python3 -u train.py)"
    )
    by_chance = verdict.evidence["ssh -t: nohup & -u"]
    assert by_chance.count("its start is chance") == 4
    assert "its start" not in verdict.evidence["nohup exec & -u"]
    outcome = {(case.classname, case.name): case.outcome for case in cases}
    assert len(outcome) == len(cases) == 56
    launches = {launch.name: launch for launch in verdict.launches}
    assert [launch.name for launch in verdict.launches] == [*verdict.evidence]
    killed = {ending.death: ending for ending in launches[f"{PIPE} -u"].endings}["SIGKILL"]
    assert (killed.result.status, killed.lost) == (0, ("exit status SIGKILL (seen: 0)",))
    assert launches[f"{PIPE} -u"].typed.startswith("bash start.sh 2>&1 | tee train.log")
    assert launches["tmux: exec > log"].group == "detached, in tmux"
    assert outcome[f"{PIPE} / -u", "SIGKILL"] is Outcome.REPRODUCED
    assert outcome[f"{EXEC} / -u", "SIGKILL"] is Outcome.ABSENT


def test_the_whole_matrix_goes_on_where_it_was_cut_short(few, cache):
    def interrupt(line):
        if line.startswith("-- 1 of"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        matrix.probe(full=True, resume=False, show=interrupt)
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    with open(path, "a") as file:
        file.write('[{"shape": "exec > l')  # as a kill leaves it
    again = []
    _, cases = matrix.probe(full=True, resume=True, show=again.append)
    assert "1 of them are from an earlier run" in again
    assert any(line.startswith("3 launches") for line in again)
    assert len(cases) == len(Store().load()) == 4
    third = []
    matrix.probe(full=True, resume=True, show=third.append)
    assert any(line.startswith("0 launches") for line in third)


def test_the_whole_matrix_starts_anew_unless_asked(few, cache):
    Store().add(Cell(EXEC, "raises", "-u"), KEPT)
    shown = []
    matrix.probe(full=True, resume=False, show=shown.append)
    assert any(line.startswith("4 launches") for line in shown)
    counts = {line[:18].rstrip(): line.split()[-5:] for line in map(click.unstyle, shown)}
    assert counts[f"{EXEC} -u"][:2] == ["2", "2/2"]
    assert counts[f"{PIPE} -u"][-1] == "0/2!"


def test_results_are_old_when_what_they_depend_on_changes(cache, monkeypatch, tmp_path):
    before = Store().path
    assert Store().path == before
    program = tmp_path / "tmux"
    program.write_text("#!/bin/sh\necho tmux 99\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Store().path != before


def test_what_could_not_be_tried_is_named(monkeypatch, tmp_path, short_tmp):
    """Without tmux its rows are not run, and are neither passed nor failed."""
    for tool in ("bash", "sh", "tee", "nohup", "mkdir", "true"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = {"": (Row("tmux: > log", "-u"), Row(EXEC, "-u"))}
    monkeypatch.setattr(matrix, "GROUPS", rows)
    monkeypatch.setattr(matrix, "COLUMNS", ("raises",))
    shown = []
    verdict, cases = matrix.probe(full=False, resume=False, show=shown.append)
    assert shown[-1] == "not run: 1 launches, no tmux here"
    (left_out,) = verdict.launches[0].endings
    assert (left_out.death, left_out.result, left_out.why) == ("raises", None, "no tmux here")
    assert [(case.outcome, case.reason) for case in cases] == [
        (None, "no tmux here"),
        (Outcome.ABSENT, "all is there"),
    ]
    assert verdict.status is Status.OK


def test_results_that_cannot_be_kept_are_not_measured(few, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file, not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    verdict, _ = matrix.probe(full=True, resume=False, show=print)
    assert verdict.status is Status.UNKNOWN
    assert str(tmp_path / "cache") in verdict.summary


def test_without_bash_nothing_can_be_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict, cases = matrix.probe(full=False, resume=False, show=print)
    assert (verdict.status, verdict.summary, cases) == (Status.UNKNOWN, "no bash here", [])


def test_a_trial_that_told_nothing_is_unknown():
    row = Row(EXEC, "-u")
    unclear = Result(started=True, log=False, kept=0, written=0, unclear="too slow")
    verdict = matrix.judge([row], ["raises"], {Cell(EXEC, "raises", "-u"): unclear})
    assert verdict.status is Status.UNKNOWN
    kept = matrix.judge([row], ["raises"], {Cell(EXEC, "raises", "-u"): KEPT})
    assert kept.status is Status.OK


def test_what_is_chance_is_marked():
    """Whether its trainer starts: in the row, in the words below, and in what is lost."""
    title = "ssh -t: nohup &"
    row, cell = Row(title, "-u"), Cell(title, "SIGKILL", "-u")
    for made in (table.Deaths([row], ["SIGKILL"]), table.Counts([row], ["SIGKILL"])):
        line = made.line(row, {cell: KEPT})
        assert any(word.endswith("?") for word in click.unstyle(line).split())
        assert any("chance" in word for word in made.legend([line]))
    never = Result(started=False, log=False, kept=0, written=0)
    said = [losses(SHAPES[title], DEATHS["SIGKILL"], result)[:2] for result in (KEPT, never)]
    assert "its start is chance (it did this time)" in said[0]
    assert said[1] == ["no log", "its start is chance (not this time)"]
    assert losses(SHAPES[EXEC], DEATHS["SIGKILL"], never) == ["no log", "never started"]


def test_what_is_lost_is_marked_and_painted():
    row, cell = Row(EXEC, "-u"), Cell(EXEC, "raises", "-u")
    made = table.Deaths([row], ["raises"])
    good = made.line(row, {cell: KEPT})
    assert good.split() == ["exec", ">", "log", "-u", "200", "tb", "1"]
    short = Result(started=True, log=True, kept=128, written=200, last_words=False, status=0)
    bad = made.line(row, {cell: short})
    assert click.unstyle(bad).split()[4:] == ["128!", "!", "0!"]
    assert bad != click.unstyle(bad)
    assert "not run" in made.line(row, {})
