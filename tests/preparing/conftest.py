"""`dflash prepare` with the tiny target, in this process."""

import json

import pytest
from click.testing import CliRunner

from dflash.cli import main
from dflash.data.completions import Completions

LENGTH = 12


@pytest.fixture
def prepare(tmp_path, tiny_target_dir, caplog):
    """A function that runs the command into `out`; returns its result, with the log as `.log`."""

    def run(source, *options, out="data"):
        caplog.clear()
        arguments = [
            *("prepare", source, "--target-model", tiny_target_dir),
            *("--output-dir", tmp_path / out, "--device", "cpu"),
            *("--max-new-tokens", LENGTH, "--max-seq-len", 64, *options),
        ]
        with caplog.at_level("INFO", "dflash"):
            result = CliRunner().invoke(main, [str(word) for word in arguments])
        result.log = caplog.text + result.stderr
        return result

    return run


@pytest.fixture
def file(tmp_path):
    """A function that writes lines, objects as JSON: `file("p.jsonl", {"prompt": "a"})`."""

    def write(name, *lines):
        path = tmp_path / name
        path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
        return path

    return write


@pytest.fixture
def rows_of():
    """A function that reads the rows of a directory."""

    def read(directory):
        data = Completions(directory)
        return [data.completion(i) for i in range(len(data))]

    return read


@pytest.fixture
def texts():
    """Three prompts of different lengths."""
    return ("def open_file(self):", "import os", "class Path:")
