"""JUnit XML: read back by a parser, and nothing that could not be checked ever passes."""

from xml.etree import ElementTree

import pytest

from diagnostics.render import junit
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status, Verdict

PASSING = {Status.OK, Outcome.ABSENT}


def parsed(verdict, *cases):
    return ElementTree.fromstring(junit.render(verdict, "fxrace", cases))


def ended(case):
    """The elements that keep a testcase from passing."""
    return [child.tag for child in case if child.tag != "system-out"]


@pytest.mark.parametrize("status", Status)
def test_only_ok_passes(status):
    suite = parsed(Verdict(status, "pipe-torn", "the pipe is torn", {"end": "left"}, "Mend it."))
    (case,) = suite
    assert (case.get("classname"), case.get("name")) == ("dflash-diag fxrace", "pipe-torn")
    assert (ended(case) == []) == (status in PASSING)
    out = case.findtext("system-out")
    assert "Mend it." in out
    assert "left" in out


@pytest.mark.parametrize("outcome", [*Outcome, None])
def test_only_absent_passes(outcome):
    case = parsed(Verdict(Status.OK, "c", "s"), junit.Case("none/later", "DF001", outcome, "why"))[
        0
    ]
    assert (case.get("classname"), case.get("name")) == ("none/later", "DF001")
    expected = {Outcome.ABSENT: [], Outcome.REPRODUCED: ["failure"]}
    expected |= {None: ["skipped"], Outcome.MEASURED: ["skipped"]}
    assert ended(case) == expected.get(outcome, ["error"])
    if ended(case):
        assert case[0].get("message") == "why"


def test_every_status_and_outcome_has_its_element():
    assert set(junit.ELEMENTS) == {*Status, *Outcome}
    assert {key for key, element in junit.ELEMENTS.items() if element is None} == PASSING


def test_the_suite_counts():
    cases = [junit.Case("c", str(n), outcome, "") for n, outcome in enumerate([*Outcome, None])]
    suite = parsed(Verdict(Status.PROBLEM, "c", "s"), *cases)
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "8", "failures": "2", "errors": "3", "skipped": "2"}


@pytest.mark.parametrize("reason", ["\x1b[31mred\x00", "<&\"'>", "\ud800", "\ufffe", "a\nb", "é😀"])
def test_any_text_can_be_read_back(reason):
    suite = parsed(Verdict(Status.UNKNOWN, "c", reason), junit.Case("c", "n", Outcome.HUNG, reason))
    kept = junit.UNWRITABLE.sub("\ufffd", reason)
    assert [case[0].get("message") for case in suite] == [kept, kept]


def test_the_encoding_is_the_one_that_is_written():
    xml = junit.render(Verdict(Status.OK, "c", "é"), "env")
    assert xml.splitlines()[0] == "<?xml version='1.0' encoding='utf-8'?>"
    assert ElementTree.fromstring(xml.encode()).findtext("testcase/system-out") == "ok: é"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text("old")
    junit.write(path, "<new/>")
    assert path.read_text() == "<new/>"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        junit.write(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
