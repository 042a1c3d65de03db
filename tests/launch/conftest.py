"""The directory that the launches of these tests are typed in; launches that are really tried."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from diagnostics.launch import launcher, pool, trial
from diagnostics.launch.trial import Cell
from tests.launch import launching

SCRIPTS = {
    "train.py": "print('step')\n",
    "start.sh": "exec python -u train.py\n",
    "run.sh": "exec python -u train.py\n",
    "keeps-signals.sh": "python -u train.py\n",
    "passes-signals.sh": "exec python -u train.py\n",
    "unattached.conf": "set -g destroy-unattached on\n",
    "nologin.conf": "set -g default-shell /usr/sbin/nologin\n",
    "bash.conf": "set -g default-shell /bin/bash\n",
    "package/__main__.py": "print('step')\n",
    "workspace/train.py": "print('step')\n",
    "home/miniconda3/etc/profile.d/conda.sh": "",
    "bin/python": "#!/bin/sh\n",
    "bin/torchrun": "#!/bin/sh\n",
    "bin/accelerate": "#!/bin/sh\n",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests do depends on none of the developer's settings, nor on tmux around them."""
    monkeypatch.setenv("SHELL", "/bin/bash")
    for name in ("TMUX", "TMUX_PANE", "PYTHONUNBUFFERED", "BASH_ENV", "CDPATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the examples take it to be, a home without settings, no tmux server."""
    for name, text in SCRIPTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    other = tmp_path / "other-root" / str(tmp_path / "workspace").lstrip("/")
    other.mkdir(parents=True)
    (other / "train.py").write_text("print('another copy')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.fixture
def short_tmp(monkeypatch):
    """A temporary directory of its own, short enough for a socket's path, and empty at the end."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []
    folder.rmdir()


@pytest.fixture
def tried(short_tmp):
    """A function that tries cells, (shape, death, buffering); skips where one cannot be tried."""

    def go(*names):
        cells = [Cell(*name) for name in names]
        if reasons := {why for cell in cells if (why := trial.why_not(cell))}:
            pytest.skip(", ".join(sorted(reasons)))
        found = dict(pool.results(cells, trial.run))
        assert not [result for result in found.values() if result.unclear]
        return [found[cell] for cell in cells]

    return go


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory to launch in, with a state directory and tmux server of its own."""
    sockets = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMUX_TMPDIR", str(sockets))
    monkeypatch.setattr(launcher, "SETTLE_S", 0.05)  # tests wait for an end where there is one
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield work
    if shutil.which("tmux"):
        subprocess.run(["tmux", "kill-server"], capture_output=True, timeout=30)
    shutil.rmtree(sockets)
    launching.end_all()
