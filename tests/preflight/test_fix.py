"""`--fix` ends what it named and was told to end, and nothing else."""

import os
import signal
from dataclasses import replace

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.preflight import fix
from tests.preflight.leftovers_made import DELETED, READY, child

STUBBORN = "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + READY


class Answers:
    """Says these in turn; keeps what was asked and said."""

    def __init__(self, *answers):
        self.answers, self.asked, self.said = list(answers), [], []

    def __call__(self, question):
        self.asked.append(question)
        return self.answers.pop(0)

    def offer(self, *lines):
        return fix.offer(lines, self, self.said.append)


def line_of(seen, process):
    [it] = seen(process.pid).table.processes
    return seen().leftovers("deleted logs", "", [(it, "writes into train.log")])


@pytest.mark.parametrize("answer", [True, False])
def test_one_question_that_names_the_process_and_its_answer_counts(seen, tmp_path, answer):
    secret = "--api-key=abc123secret"
    with child(DELETED, tmp_path / "log", secret) as (process, _):
        answers = Answers(answer)
        line = line_of(seen, process)
        ended = answers.offer(line, line)  # found by two checks, asked about once
        assert ended == answer
        assert (process.poll() is None) == (not answer) or process.wait(30) == -signal.SIGTERM
    [question] = answers.asked
    for part in (f"End {process.pid} (", "s old, yours: ", "writes into train.log"):
        assert part in question
    assert "abc123secret" not in question


@pytest.mark.parametrize("answer", [True, False])
def test_killing_is_another_question(seen, monkeypatch, answer):
    monkeypatch.setattr(fix, "ENDS_S", 0.2)
    with child(STUBBORN) as (process, _):
        answers = Answers(True, answer)
        monkeypatch.setattr(fix, "_has_ended", waits_longer_for_sigkill(answers))
        assert answers.offer(line_of(seen, process)) == answer
        assert process.wait(30) == -signal.SIGKILL if answer else process.poll() is None
    assert "does not end" in answers.asked[1] and str(process.pid) in answers.asked[1]


def waits_longer_for_sigkill(answers, really=fix._has_ended):
    def has_ended(handle):
        if len(answers.asked) > 1:
            fix.ENDS_S = 30.0
        return really(handle)

    return has_ended


def test_a_number_that_another_process_has_now_is_left_alone(seen):
    with child("import sys" + READY) as (process, _):
        line = line_of(seen, process)
        [culprit] = line.culprits
        earlier = replace(culprit, process=replace(culprit.process, ticks=1))
        answers = Answers()
        assert answers.offer(replace(line, culprits=(earlier,))) == 0
        assert process.poll() is None
    assert answers.said == [f"{process.pid} is another process now"]


def test_one_that_has_gone_meanwhile_is_not_asked_about(seen):
    with child("import sys" + READY) as (process, _):
        line = line_of(seen, process)
    answers = Answers()
    assert answers.offer(line) == 0 and "ended meanwhile" in answers.said[0]


def test_nothing_is_asked_without_a_terminal(monkeypatch):
    monkeypatch.setattr(fix, "offer", lambda *_, **__: pytest.fail("it asked"))
    done = CliRunner().invoke(main, ["preflight", "--fix"], input="y\n" * 99)
    assert done.exit_code == 2 and "terminal" in done.output


def test_this_process_and_those_above_it_are_never_offered():
    from diagnostics import processes

    own = {os.getpid(), os.getppid()} - {1}
    assert not own & {process.pid for process in processes.look().processes}
