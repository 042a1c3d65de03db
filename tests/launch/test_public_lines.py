"""What reading finds in launches as they are met in public."""

from pathlib import Path

import pytest

from diagnostics.launch.check import check
from diagnostics.launch.shell import Source
from tests.launch.public_lines import NOT_CAUGHT, README_LINES, REPORTS, Line


@pytest.mark.parametrize("line", (*README_LINES, *REPORTS), ids=lambda line: line.name)
def test_what_is_found_in_it(line: Line, world: Path) -> None:
    report = check(Source("command line", line.text))
    assert report.launch.trainer is not None
    assert {f.rule.code for f in report.findings} == {*line.found}
    assert {f.rule.code for f in report.unknown} == {*line.unknown}


@pytest.mark.parametrize("line", (*README_LINES, *REPORTS), ids=lambda line: line.name)
def test_every_mended_text_loses_what_it_mends(line: Line, world: Path) -> None:
    report = check(Source("command line", line.text))
    if not report.mended:
        assert sum(1 for finding in report.findings if finding.mended) < 2
        return
    again = check(Source("command line", report.mended))
    assert len(again.findings) < len(report.findings)
    assert {f.rule.code for f in again.findings} <= {f.rule.code for f in report.findings}


def test_every_report_that_is_not_caught_says_why() -> None:
    caught = " ".join(line.report for line in REPORTS)
    assert not [report for report in NOT_CAUGHT if report in caught]
    assert all(NOT_CAUGHT.values())
