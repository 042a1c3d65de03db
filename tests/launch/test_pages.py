"""The pages are what the rules say."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.launch import pages
from diagnostics.launch.rules import MODULES, RULES

COMMITTED = Path(__file__).parents[2] / "docs" / "launch-findings.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == pages.page(), (
        "type: python -m diagnostics.launch.pages > docs/launch-findings.md"
    )


def test_codes_are_unique_and_without_gaps() -> None:
    listed = [rule.code for module in MODULES for rule in module.RULES]
    assert sorted(listed) == [f"DL{number:03}" for number in range(1, len(listed) + 1)]


@pytest.mark.parametrize("code", RULES)
def test_explain_prints_the_page(code: str) -> None:
    result = CliRunner().invoke(main, ["explain", code.lower()])
    assert result.exit_code == 0
    rule = RULES[code]
    assert result.output.startswith(f"{code}: {rule.title} ({rule.severity})\n")
    for launch in (rule.wrong, rule.right):
        assert all(line in result.output for line in launch.splitlines())


def test_explain_names_the_codes_for_one_it_does_not_know() -> None:
    result = CliRunner().invoke(main, ["explain", "DL999"])
    assert result.exit_code == 2 and "DL001, DL002" in result.output
