"""A preparation that was interrupted, killed or torn goes on, and ends the same."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.data.regenerate import Writer

ROOT = Path(__file__).parents[2]
LENGTH = 12


def journal_of(tmp_path):
    return tmp_path / ".preparing-data"


@pytest.fixture
def stopped(prepare, monkeypatch, file, texts):
    """A function that prepares six prompts in batches of two and is interrupted at a batch."""
    source = file("p.txt", *texts, "def a():", "def b(x):", "with open(")
    options = ("--batch-size", 2, "--temperature", 1.0)
    assert prepare(source, *options, out="whole").exit_code == 0
    write = Writer.write

    def run(at_batch, *more):
        def interrupted(self, batch, first):
            if first == 2 * at_batch:
                raise KeyboardInterrupt
            return write(self, batch, first)

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "write", interrupted)
            result = prepare(source, *options, *more)
        return result, lambda *more: prepare(source, *options, *more)

    return run


@pytest.mark.parametrize("at_batch", [0, 1, 2])
def test_an_interrupted_preparation_goes_on_and_ends_the_same(stopped, tmp_path, at_batch, rows_of):
    result, resume = stopped(at_batch)
    assert result.exit_code == 75
    assert not (tmp_path / "data").exists()
    assert "the same command goes on" in result.log
    assert resume().exit_code == 0
    assert rows_of(tmp_path / "data") == rows_of(tmp_path / "whole")
    assert not journal_of(tmp_path).exists()


def test_a_line_torn_at_any_byte_is_written_again(stopped, tmp_path, monkeypatch, rows_of):
    _, resume = stopped(2)
    lines = (journal_of(tmp_path) / "batches.jsonl").read_bytes()
    second = lines.index(b"\n") + 1
    for end in (second, second + 1, (second + len(lines)) // 2, len(lines) - 1):
        journal_of(tmp_path).mkdir(exist_ok=True)
        (journal_of(tmp_path) / "batches.jsonl").write_bytes(lines[:end])
        result = resume()
        assert result.exit_code == 0, result.log
        assert "2 of 6 prompts were done before" in result.log
        assert rows_of(tmp_path / "data") == rows_of(tmp_path / "whole")
        (tmp_path / "data").rename(tmp_path / f"data-{end}")


def test_other_settings_do_not_go_on_with_it(stopped):
    _, resume = stopped(1)
    result = resume("--seed", 5)
    assert result.exit_code == 1
    assert "was begun with other settings: generation" in result.log
    assert "delete that directory" in result.log
    assert resume().exit_code == 0


def test_two_processes_do_not_write_the_same(stopped, tmp_path):
    _, resume = stopped(1)
    with (journal_of(tmp_path) / "batches.jsonl").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = resume()
    assert (result.exit_code, "being written by another process" in result.log) == (1, True)


def test_a_killed_process_goes_on_without_losing_or_repeating_a_row(
    prepare, tmp_path, tiny_target_dir, file, rows_of, texts
):
    source = file("p.txt", *texts, "def a():", "def b(x):")
    code = (
        "import os, signal, sys\n"
        "from dflash.data.journal import Journal\n"
        "append = Journal.append\n"
        "def killed(self, rows):\n"
        "    append(self, rows)\n"
        "    if self.batches == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Journal.append = killed\n"
        "from dflash.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = [
        *("prepare", source, "--target-model", tiny_target_dir, "--output-dir", tmp_path / "data"),
        *("--device", "cpu", "--max-new-tokens", LENGTH, "--max-seq-len", 64, "--batch-size", 2),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    result = prepare(source, "--batch-size", 2)
    assert "4 of 5 prompts were done before" in result.log
    assert [row.id for row in rows_of(tmp_path / "data")] == ["1", "2", "3", "4", "5"]
    assert prepare(source, "--batch-size", 2, out="whole").exit_code == 0
    assert rows_of(tmp_path / "data") == rows_of(tmp_path / "whole")
