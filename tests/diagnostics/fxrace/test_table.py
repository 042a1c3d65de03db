"""The fxrace table: what a cell is called, what is concluded, and how the child is read."""

import json

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
        (BAD, BAD, "no-op"),
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


def cell(code, cure, outcome, reason="why", manner="", when="later"):
    return Cell(code, cure, when, outcome, reason, manner)


def test_no_op_means_bad_in_the_same_way():
    bare = cell("DF005", "none", BAD, "left patched, 1 wrong graph")
    partly = cell("DF005", "c", BAD, "left patched")
    assert Report("2.13", (bare, partly)).word("DF005", "c", "later") == "BAD"


def test_a_silent_fall_back_and_a_mask_are_not_cures():
    cells = (
        cell("DF001", "none", BAD),
        cell("DF001", "none", FINE, manner="masked", when="in-compile"),
        cell("DF001", "e", BAD, manner="silent"),
        cell("DF001", "k", FINE, manner="masked"),
    )
    tried = Report("2.13", cells)
    assert tried.word("DF001", "none", "in-compile") == "mask"
    assert tried.word("DF001", "e", "later") == "eager"
    assert tried.word("DF001", "k", "later") == "mask"
    assert tried.holding("DF001") == []


def test_a_masked_failure_is_not_clean():
    cells = (cell("DF001", "none", FINE, manner="masked"),)
    assert table.judge(Report("2.13", cells)).status is Status.UNKNOWN


def test_what_one_thread_cannot_do_either_shows_nothing():
    broken = (cell("DF000", "none", BAD), cell("DF001", "none", BAD))
    assert table.judge(Report("2.13", broken)).status is Status.UNKNOWN
    cured = (cell("DF000", "none", FINE), cell("DF000", "a", BAD))
    assert Report("2.13", cured).word("DF000", "a", "later") == "break"


def test_a_cost_is_shown_as_measured():
    cells = (cell("COST", "shipped", Outcome.MEASURED, "0.9 s"),)
    assert Report("2.13", cells).word("COST", "shipped", "later") == "0.9 s"


def test_the_bare_row_is_never_said_to_hold():
    words = [report(none=(o,)).word("DF001", "none", "later") for o in (BAD, FINE, UNSURE)]
    assert words == ["BAD", "fine", "?"]


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


def test_one_cure_for_all_is_said_in_one_line():
    verdict = table.judge(report(none=(BAD, BAD), shipped=(FINE, FINE), c2=(FINE, BAD)))
    assert verdict.remedy.startswith("all are cured by: shipped")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('no torch')", "ended early: exit code 1: no torch"),
        (
            'print(\'{"torch": "2", "left_out": [], "cells": ["DF001:none:later"]}\');'
            " raise SystemExit('gone')",
            "ended early: exit code 1: gone",
        ),
    ],
)
def test_a_child_that_ends_early_is_not_a_clean_result(monkeypatch, tmp_path, program, message):
    (tmp_path / "cells.py").write_text(program)
    monkeypatch.setattr(table, "reproducer_dir", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=message):
        table.measure([], lambda _line: None)


def test_rows_are_shown_in_order_as_they_fill(monkeypatch, tmp_path):
    cells = ["DF001:none:later", "DF001:c:later", "DF001:c2:later"]
    lines = [json.dumps({"torch": "2.13", "left_out": ["DF012"], "cells": cells})]
    for cure, outcome in (("c2", "absent"), ("none", "reproduced"), ("c", "cannot tell")):
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
    assert shown == [
        "DF001  fx flag",
        "\ntorch 2.13            DF001",
        "no cure               BAD",
        "c                     ?",
        "c2                    holds",
        "",
        "BAD    it happens",
        "holds  it happens without the cure, and not with it",
        "?      the run could not tell",
        "DF001 (c): cannot tell: why",
        "not run: DF012, which need CUDA (--device cuda)",
    ]
