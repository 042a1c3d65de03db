"""The fxrace table: what a cell is called, what is concluded, and how the child is read."""

import pytest

from diagnostics.probes.fxrace import table
from diagnostics.probes.fxrace.table import Cell, Report
from diagnostics.reproducers import Outcome
from diagnostics.verdict import Status

BAD, FINE, UNSURE = Outcome.REPRODUCED, Outcome.ABSENT, Outcome.CANNOT_TELL


def report(**rows: tuple[Outcome, ...]) -> Report:
    """Cures (underscores for dashes, a trailing _first for start-up) -> outcomes, DF001 first."""
    cells = []
    for name, outcomes in rows.items():
        when = "start-up" if name.endswith("_first") else "later"
        cure = name.removesuffix("_first").replace("_", "-")
        for number, outcome in enumerate(outcomes, start=1):
            cells.append(Cell(f"DF00{number}", cure, when, outcome, "why"))
    return Report("2.13.0", tuple(cells))


@pytest.mark.parametrize(
    ("bare", "cured", "word"),
    [
        (BAD, FINE, "holds"),
        (BAD, BAD, "BAD"),
        (BAD, UNSURE, "?"),
        (BAD, Outcome.HUNG, "HANG"),
        (BAD, Outcome.CRASHED, "crash"),
        (FINE, FINE, "-"),
        (UNSURE, FINE, "-"),  # who cannot show the failure cannot show a cure
        (FINE, BAD, "BAD"),  # a cure that breaks what was whole
    ],
)
def test_a_cure_is_judged_against_the_run_without_it(bare, cured, word):
    assert report(none=(bare,), gate_only=(cured,)).word("DF001", "gate-only", "later") == word


def test_the_bare_row_is_never_said_to_hold():
    words = [report(none=(o,)).word("DF001", "none", "later") for o in (BAD, FINE, UNSURE)]
    assert words == ["BAD", "absent", "?"]


def test_a_cure_holds_only_if_it_does_at_every_moment():
    tried = report(none=(BAD,), gate_only=(BAD,), gate_only_first=(FINE,), c2=(FINE,))
    assert tried.holding("DF001") == ["c2"]


@pytest.mark.parametrize(
    ("bare", "status"),
    [
        ((BAD, FINE), Status.PROBLEM),
        ((FINE, UNSURE), Status.UNKNOWN),
        ((FINE, Outcome.CRASHED), Status.UNKNOWN),
        ((FINE, Outcome.HUNG), Status.UNKNOWN),
        ((FINE, FINE), Status.OK),
    ],
)
def test_unknown_is_never_clean(bare, status):
    assert table.judge(report(none=bare)).status is status


def test_the_remedy_names_the_cures_per_failure():
    verdict = table.judge(report(none=(BAD, BAD), c2=(FINE, BAD)))
    assert verdict.remedy == "DF001 is cured by: c2\n  DF002 is cured by: nothing that was tried"


def test_without_the_bare_run_no_cure_is_judged():
    chosen = table.arguments(["DF001"], ["gate-only"], False)
    assert list(chosen) == ["--code", "DF001", "--cure", "none", "--cure", "gate-only"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('no torch')", "ended early: no torch"),
        (
            'print(\'{"torch": "2", "cells": ["DF001:none:later"]}\'); raise SystemExit(\'gone\')',
            "ended early: gone",
        ),
    ],
)
def test_a_child_that_ends_early_is_not_a_clean_result(monkeypatch, tmp_path, program, message):
    (tmp_path / "cells.py").write_text(program)
    monkeypatch.setattr(table, "reproducer_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=message):
        table.measure([], lambda _line: None)


def test_rows_are_shown_in_order_as_they_fill(monkeypatch, tmp_path):
    lines = ['{"torch": "2.13", "cells": ["DF001:none:later", "DF001:c:later", "DF001:c2:later"]}']
    for cure, outcome in (("c2", "absent"), ("none", "reproduced"), ("c", "cannot-tell")):
        lines.append(
            f'{{"code": "DF001", "cure": "{cure}", "when": "later", "outcome": "{outcome}",'
            ' "reason": "why"}'
        )
    (tmp_path / "cells.py").write_text(f"print({chr(10).join(lines)!r})")
    (tmp_path / "df001_fx_flag.py").touch()
    monkeypatch.setattr(table, "reproducer_dir", lambda: tmp_path)
    monkeypatch.setattr("diagnostics.reproducers.reproducer_dir", lambda: tmp_path)
    shown: list[str] = []
    table.measure([], shown.append)
    assert [line.split() for line in shown[2:]] == [
        ["no", "cure", "BAD"],
        ["c", "?"],
        ["c2", "holds"],
        ["DF001:", "cannot", "tell:", "why"],
    ]
