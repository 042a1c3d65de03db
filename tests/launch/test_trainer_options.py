"""`dflash train` in a launch: its options and paths, held against its own configuration."""

import pytest

from diagnostics.launch.check import check
from diagnostics.launch.rules import trainer
from diagnostics.launch.shell import Source


def found(launch):
    report = check(Source("command line", launch))
    return [f for f in report.findings if f.rule.code == "DL036"], [
        f for f in report.unknown if f.rule.code == "DL036"
    ]


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return "dflash train --target-model model --data-dir data --output-dir out"


def test_what_it_would_take_is_not_found(here):
    assert found(f"{here} --block-size 8") == ([], [])


@pytest.mark.parametrize(
    ("options", "span", "says"),
    [
        ("--block-size 1", "--block-size", "--block-size must be at least 2, got 1"),
        ("--blok-size 8", "--blok-size", "No such option"),
        ("--grad-clip x", "--grad-clip", "grad-clip"),
    ],
)
def test_an_option_that_it_would_refuse_is_pointed_at(here, options, span, says):
    for launch in (f"{here} {options}", f"tmux new-session -d '{here} {options} > log'"):
        (finding,), _ = found(launch)
        assert finding.hit.span.text == span
        assert says in finding.hit.what


def test_a_path_that_is_not_there_is_named(here):
    (finding,), _ = found(here.replace("data-dir data", "data-dir /no/data"))
    assert finding.hit.what == "--data-dir: there is no /no/data"
    assert finding.hit.span.text == "/no/data"


def test_values_of_variables_are_put_in(here):
    assert found(f"B=8; {here} --block-size $B") == ([], [])
    (finding,), _ = found(f"B=1; {here} --block-size $B")
    assert "got 1" in finding.hit.what


@pytest.mark.parametrize("broken", ["slow", "crashes"])
def test_without_an_answer_it_is_unknown(here, broken, monkeypatch):
    """Neither taken nor refused: that would be a guess."""
    if broken == "slow":
        monkeypatch.setattr(trainer, "ANSWER_S", 0.0)
    else:
        monkeypatch.setattr(trainer.sys, "executable", "/bin/false")
    findings, (unknown,) = found(f"{here} --block-size 1")
    assert findings == []
    assert "dflash config gave no answer" in unknown.hit.what


def test_what_is_not_said_is_unknown(here):
    findings, (unknown,) = found(f"{here} --block-size $B")
    assert findings == []
    assert "what $B stands for is not said" in unknown.hit.what


def test_paths_of_another_machine_are_unknown_and_options_are_checked(here):
    (finding,), unknown = found(f"ssh host '{here} --block-size 1'")
    assert "got 1" in finding.hit.what
    assert {u.hit.span.text for u in unknown} == {"model", "data"}


def test_another_program_is_none_of_its_business(here):
    assert found("python train.py --block-size 1") == ([], [])
