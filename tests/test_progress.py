"""Progress: nothing of the items changes, and a log gets few lines."""

import pytest

from dflash.progress import shown


@pytest.mark.parametrize(("total", "lines"), [(1, 1), (7, 7), (10, 10), (1000, 10)])
def test_a_log_gets_at_most_ten_lines(capsys, total, lines):
    assert list(shown(range(total), total, "prompts")) == list(range(total))
    written = capsys.readouterr()
    assert written.out == ""
    assert len(written.err.splitlines()) == lines
    assert written.err.splitlines()[-1] == f"prompts: {total} of {total}, 0:00:00 left"


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(shown(iter("abc"), 3, "prompts")) == ["a", "b", "c"]
    assert "prompts: " not in capsys.readouterr().err


def test_leaving_early_is_fine(capsys):
    items = shown(range(10), 10, "prompts")
    assert next(items) == 0
    items.close()
    assert capsys.readouterr().err == ""
