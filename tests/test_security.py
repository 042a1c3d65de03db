"""The claims of docs/security.md that no other test makes."""

import ast
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import faults
from dflash.heartbeat import Heartbeat

ROOT = Path(__file__).parents[1]
SOURCES = sorted(p for d in ("dflash", "diagnostics", "repro") for p in (ROOT / d).rglob("*.py"))


def calls(path):
    """(line, dotted name, keywords) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), {k.arg: k.value for k in node.keywords}


def places(forbidden):
    """Where a call is one that `forbidden` says no to."""
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        for line, name, keywords in calls(path)
        if forbidden(name, keywords)
    ]


def test_the_search_finds_what_it_looks_for():
    """The control: ordinary calls are seen."""
    assert places(lambda name, _: name == "subprocess.run")


def test_no_shell_is_started_on_text():
    def is_shell(name, keywords):
        shell = keywords.get("shell")
        named = name in ("os.system", "os.popen", "subprocess.getoutput")
        return named or (shell is not None and not is_false(shell))

    assert places(is_shell) == []


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


def test_nothing_is_unpickled_or_evaluated():
    loads = ("pickle.load", "pickle.loads", "torch.load", "yaml.load", "marshal.loads")
    assert places(lambda name, _: name in loads or name == "eval") == []


def test_no_name_in_tmp_can_be_guessed():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("/tmp/", "/var/tmp/"))
    ]
    assert found == []
    assert places(lambda name, _: name.endswith("mktemp")) == []


def test_a_link_in_the_way_of_the_heartbeat_is_replaced_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    path = tmp_path / "heartbeat"
    path.symlink_to(precious)
    Heartbeat(path, ["a"], start_limit_s=1.0, limit_s=1.0)
    assert precious.read_text() == "keep"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("handles", [False, True])
def test_only_a_process_that_handles_the_signal_is_sent_it(tmp_path, handles):
    """Without a handler it would die of it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom dflash import faults\n"
        "def wait(): print(1, flush=True); input()\n"
        + ("with faults.stacks_on_signal(Path(sys.argv[1])): wait()\n" if handles else "wait()\n")
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as child:
        child.stdout.readline()
        told = faults.ask(child.pid, tmp_path)
        assert child.poll() is None
        assert ("in wait" in told) == handles
        child.send_signal(signal.SIGKILL)


def test_a_local_variable_is_never_shown(tmp_path):
    program = tmp_path / "secret.py"
    program.write_text(
        "import threading\n"
        "class Client:\n"
        "    def __init__(self): self.password = 'sesame123'\n"
        "    def wait(self, key='sesame456'):\n"
        "        print(1, flush=True)\n"
        "        threading.Event().wait()\n"
        "Client().wait()\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        told = [
            subprocess.run(
                [sys.executable, "-m", "diagnostics", "stacks", str(child.pid), *words],
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            ).stdout
            for words in ([], ["--json"])
        ]
        child.kill()
    assert "secret.py" in told[0]
    assert not any("sesame" in text for text in told)
