"""A Python whose pip and venv are played, so that no test needs an index."""

import json
import sys

import pytest

PROGRAM = """#!{python} -IS
import json, os, pathlib, signal, sys
arguments, state = sys.argv[1:], pathlib.Path({state!r})
with (state / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + chr(10))
leaks = [name for name in os.environ if name.startswith("PYTHON")]
if leaks:
    sys.exit(f"leaked: {{leaks}}")
if "import torch" in arguments[-1]:
    sys.exit((state / "import").read_text() or None)
if arguments[0] == "-c":
    print("py311 " + (state / "pip").read_text())
elif "venv" in arguments:
    (pathlib.Path(arguments[-1]) / "bin").mkdir()
    (pathlib.Path(arguments[-1]) / "bin" / "python").symlink_to(__file__)
elif "index" in arguments:
    print("torch (2.14.1)" + chr(10) + (state / "index").read_text())
elif "--dry-run" in arguments:
    report = state / arguments[-1]
    if not report.exists():
        sys.exit("WARNING: x" + chr(10) + "ERROR: No torch like that" + chr(10) + "ERROR: Read on")
    print(report.read_text())
elif (state / "hang").exists():
    (state / "pid").write_text(str(os.getpid()))
    signal.pause()
elif (state / "fail").exists():
    sys.exit("ERROR: disk full at https://me:secret@index.invalid/")
"""


class FakePython:
    """Its path, what it was called with, and the files that it answers from."""

    def __init__(self, state):
        self.state = state
        self.path = state / "fakepython"
        self.path.write_text(PROGRAM.format(python=sys.executable, state=str(state)))
        self.path.chmod(0o700)
        (state / "import").touch()
        (state / "pip").write_text("23.2.1")

    def offers(self, version, *names, size=2**20, local=True, resolved=None):
        """Have pip take torch and these other distributions for `torch==version`."""
        items = []
        for name in ("torch", *names):
            wheel = self.state / f"{name}.whl"
            with wheel.open("wb") as file:
                file.truncate(size)
            url = wheel.as_uri() if local else f"https://127.0.0.1:1/{wheel.name}"
            metadata = {"name": name, "version": resolved or version}
            items.append({"metadata": metadata, "download_info": {"url": url}})
        (self.state / f"torch=={version}").write_text(json.dumps({"install": items}))

    def calls(self, *words):
        """The calls that had all these among their arguments."""
        calls = map(json.loads, (self.state / "calls").read_text().splitlines())
        return [call for call in calls if set(words) <= set(call)]


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    return FakePython(state)
