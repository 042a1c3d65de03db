"""The command line of fxrace: which part answers, what is refused, and what is written."""

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.probes.fxrace import explore, stress, table
from diagnostics.probes.fxrace.table import Cell, Report
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict


def fxrace(*options):
    return CliRunner().invoke(main, ["fxrace", *options])


@pytest.fixture
def measured(monkeypatch):
    """The options that repro/cells.py got; it answers with two cells."""
    got = []
    cells = (
        Cell("DF001", "none", "later", Outcome.REPRODUCED, "it failed"),
        Cell("DF001", "none", "in-compile", Outcome.ABSENT, "hidden", "masked"),
        Cell("DF001", "shipped", "later", Outcome.ABSENT, "fine"),
        Cell("DF002", "none", "later", Outcome.ABSENT, "fine"),
        Cell("DF002", "shipped", "later", Outcome.ABSENT, "fine"),
    )

    def measure(arguments, show):
        got.extend(arguments)
        show("a row")
        return Report("2.13", cells)

    monkeypatch.setattr(table, "measure", measure)
    return got


def test_no_cure_is_judged_without_the_bare_run(measured):
    assert fxrace("--mode", "DF001", "--cure", "gate-only", "--full").exit_code == 1
    assert measured[:7] == ["--code", "DF001", "--cure", "none", "--cure", "gate-only", "--full"]


def test_quick_is_one_failure_and_the_shipped_cure(measured):
    fxrace("--quick")
    assert measured[:6] == ["--code", "DF001", "--cure", "none", "--cure", "shipped"]


def test_json_is_one_object_and_rows_are_beside_it(measured):
    result = fxrace("--json")
    assert json.loads(result.stdout)["status"] == "problem"
    assert result.stderr == "a row\n"


def test_junit_has_a_case_for_each_cell_and_unknown_never_passes(measured, tmp_path):
    report = tmp_path / "fxrace.xml"
    fxrace("--junit", str(report))
    suite = ElementTree.parse(report).getroot()
    found = {(case.get("classname"), case.get("name")): [e.tag for e in case] for case in suite}
    assert found["none/later", "DF001"] == ["failure"]
    assert found["none/in-compile", "DF001"] == ["error"]  # masked is not a pass
    assert found["shipped/later", "DF001"] == []
    assert found["shipped/later", "DF002"] == ["skipped"]  # nothing to cure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--log", "x", "--stress"), "--log and --stress: one of them at a time"),
        (("--mode", "DF999"), "--mode DF999: choose from DF000, DF001"),
        (("--cure", "prayer"), "--cure prayer: choose from none, "),
        (("--stress", "--cure", "none", "--cure", "shipped"), "one --cure at a time"),
        (("--torch", "2.x"), "Type versions with commas between"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(options, message):
    result = fxrace(*options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_reproducers_that_do_not_run_are_unknown(monkeypatch):
    def measure(*_):
        raise RuntimeError("the reproducers ended early: no torch")

    monkeypatch.setattr(table, "measure", measure)
    result = fxrace()
    assert result.exit_code == 3
    assert "no torch" in result.stdout


def test_stress_and_explore_get_their_options(monkeypatch, tmp_path):
    got = []
    fine = Verdict(Status.OK, "c", "fine")
    monkeypatch.setattr(stress.Load, "run", lambda self: got.append(self._arguments) or fine)
    monkeypatch.setattr(explore, "probe", lambda arguments, _show: got.append(arguments) or fine)
    assert fxrace("--stress", "--seconds", "7", "--windows", "--cure", "shipped").exit_code == 0
    schedule = tmp_path / "schedule.json"
    assert fxrace("--explore", "--cure", "shipped", "--save", str(schedule)).exit_code == 0
    assert fxrace("--replay", str(schedule)).exit_code == 0
    load = ["--seconds", "7", "--device", "cpu", "--drafters", "3", "--targets", "1", "--windows"]
    assert got == [
        [*load, "--cure", "shipped"],
        ["--save", str(schedule), "--cure", "shipped"],
        ["--replay", str(schedule)],
    ]
