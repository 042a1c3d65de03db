"""Several versions of torch: what is asked, measured, shown and concluded."""

import click
import pytest

from diagnostics.probes.fxrace import table, versions
from diagnostics.probes.fxrace.environments import Workshop
from diagnostics.probes.fxrace.table import Cell, Report
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status

BAD, FINE, UNSURE = Outcome.REPRODUCED, Outcome.ABSENT, Outcome.CANNOT_TELL


def report(torch, *outcomes, **changes):
    cells = [
        Cell(f"DF00{number}", "none", "later", outcome, "why", **changes)
        for number, outcome in enumerate(outcomes, start=1)
    ]
    return Report(torch, tuple(cells))


@pytest.fixture
def said():
    return []


@pytest.fixture
def several(fake_python, said, monkeypatch):
    """A function: versions with their reports, or the error that measuring them raises."""
    measured = {}

    def measure(arguments, show, python):
        assert list(arguments) == ["--code", "DF001"]
        (version,) = (v for v in measured if f"torch-{v}-" in python)
        if isinstance(measured[version], Exception):
            raise measured[version]
        return measured[version]

    def make(**reports):
        measured.update({name.replace("_", ".")[1:]: what for name, what in reports.items()})
        for version in measured:
            fake_python.offers(version)
        workshop = Workshop(str(fake_python.path), said.append)
        surveyed = versions.Versions(workshop, ["--code", "DF001"], said.append)
        surveyed.survey([*measured])
        return surveyed

    monkeypatch.setattr(table, "measure", measure)
    return make


def test_versions_are_sorted_as_versions():
    assert versions.parse("2.13.0, 2.9.1,2.11.0,2.9.1") == ["2.9.1", "2.11.0", "2.13.0"]
    with pytest.raises(click.BadParameter, match=r"--torch 2\.11\.0,2\.13\.0"):
        versions.parse("2.13.0;latest")


def test_the_table_has_a_row_for_each_version(several, said):
    surveyed = several(v2_11_0=report("2.11.0", BAD, FINE), v2_14_1=report("2.14.1", FINE, UNSURE))
    versions.compare(surveyed, ["2.11.0", "2.14.1"])
    assert [line.split() for line in said[-3:]] == [
        ["torch", "DF001", "DF002"],
        ["2.11.0", "BAD", "fine"],
        ["2.14.1", "fine", "?"],
    ]


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (BAD, FINE, Status.PROBLEM),
        (UNSURE, BAD, Status.PROBLEM),
        (UNSURE, FINE, Status.UNKNOWN),
        (FINE, FINE, Status.OK),
        (FINE, RuntimeError("ended early"), Status.UNKNOWN),
    ],
)
def test_unknown_is_never_clean(several, first, second, status):
    def on(version, outcome):
        return outcome if isinstance(outcome, Exception) else report(version, outcome)

    surveyed = several(v2_11_0=on("2.11.0", first), v2_14_1=on("2.14.1", second))
    verdict = versions.compare(surveyed, ["2.11.0", "2.14.1"])
    assert verdict.status is status
    assert ("2.14.1 has none" in verdict.summary) == (second is FINE)
    assert ("2.11.0 has DF001" in verdict.summary) == (first is BAD)


def test_a_version_that_cannot_be_had_is_no_clean_version(several, said):
    surveyed = several(v2_14_1=report("2.14.1", FINE))
    surveyed.survey(["9.9"])
    verdict = versions.compare(surveyed, ["2.14.1", "9.9"])
    assert verdict.status is Status.UNKNOWN
    assert "No torch like that" in verdict.evidence["9.9"]
    assert "9.9 was not measured" in verdict.summary


def test_an_environment_that_cannot_be_made_is_no_clean_version(several, fake_python):
    surveyed = several(v2_14_1=report("2.14.1", FINE))
    (fake_python.state / "fail").touch()
    verdict = versions.compare(surveyed, ["2.14.1"])
    assert verdict.status is Status.UNKNOWN
    assert "disk full" in verdict.evidence["2.14.1"]


def test_a_cure_and_a_moment_have_rows_below_their_version():
    cells = [
        Cell(code, cure, when, outcome, "why")
        for code, cure, when, outcome in (
            ("DF003", "none", "later", BAD),
            ("DF001", "none", "later", BAD),
            ("DF001", "none", "in-compile", FINE),
            ("DF001", "shipped", "later", FINE),
        )
    ]
    assert [line.split() for line in versions.rows(Report("2.13.0", tuple(cells)), head=True)] == [
        ["torch", "DF001", "DF003"],
        ["2.13.0", "BAD", "BAD"],
        ["within", "a", "compile", "fine"],
        ["shipped", "holds"],
    ]


def test_an_environment_that_is_there_is_used_again(several, said, fake_python):
    several(v2_14_1=report("2.14.1", FINE)).report("2.14.1")
    again = several(v2_14_1=report("2.14.1", FINE))
    assert any("made before" in line for line in said)
    assert again.report("2.14.1")
    assert len(fake_python.calls("venv")) == 1


def test_a_large_download_is_asked_for_and_never_taken_for_granted(fake_python, said, monkeypatch):
    fake_python.offers("2.12.1", "nvidia-cublas", local=False)
    surveyed = versions.Versions(Workshop(str(fake_python.path), said.append), [], said.append)
    surveyed.survey(["2.12.1"])
    question = surveyed.to_ask_for()
    assert "torch 2.12.1, a CUDA build" in question
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert not versions.ask(yes=False)(question)
    assert versions.ask(yes=True)(question)
    verdict = versions.refused(question)
    assert verdict.status is Status.UNKNOWN
    assert "--yes" in verdict.remedy
    assert not fake_python.calls("--no-compile")


def test_stable_releases_are_listed_once_each_oldest_first(fake_python, said):
    listed = "2.15.0.dev1, 2.14.1, 2.13.0+cpu, 2.13.0, 2.10.0, 2.9.1, 2.9.0rc1, 2.8.0"
    (fake_python.state / "index").write_text(f"Available versions: {listed}\n")
    surveyed = versions.Versions(Workshop(str(fake_python.path), said.append), [], said.append)
    assert surveyed.stable() == ["2.9.1", "2.10.0", "2.13.0", "2.14.1"]


def test_bisect_names_the_first_version_without_it(several):
    reports = {"v2_11_0": BAD, "v2_12_1": BAD, "v2_13_0": BAD, "v2_14_0": FINE, "v2_14_1": FINE}
    surveyed = several(**{name: report(name, outcome) for name, outcome in reports.items()})
    names = [name.replace("_", ".")[1:] for name in reports]
    verdict = versions.bisect(surveyed, names, ["DF001"])
    assert verdict.status is Status.OK
    assert "DF001 is gone in 2.14.0, last seen in 2.13.0" in verdict.summary
    assert "if what is gone stays gone" in verdict.summary


def test_bisect_does_without_a_version_that_cannot_be_had(several):
    surveyed = several(v2_11_0=report("2.11.0", BAD), v2_14_1=report("2.14.1", FINE))
    surveyed.survey(["2.15.0"])
    verdict = versions.bisect(surveyed, ["2.11.0", "2.14.1", "2.15.0"], ["DF001"])
    assert "gone in 2.14.1" in verdict.summary
    assert "not measured" in verdict.evidence["2.15.0"]


@pytest.mark.parametrize("newest", [BAD, UNSURE])
def test_bisect_cannot_tell_without_an_end_that_is_clean(several, newest):
    surveyed = several(v2_11_0=report("2.11.0", BAD), v2_14_1=report("2.14.1", newest))
    verdict = versions.bisect(surveyed, ["2.11.0", "2.14.1"], ["DF001"])
    assert verdict.status is Status.UNKNOWN
    assert "DF001: cannot tell: the newest, 2.14.1" in verdict.summary


def test_what_is_only_masked_is_not_gone(several):
    surveyed = several(v2_13_0=report("2.13.0", FINE, manner="masked"))
    assert surveyed.has("DF001", "2.13.0") is None
