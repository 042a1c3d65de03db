"""Environments with one torch: what pip is asked, and that nothing half made is ever used."""

import fcntl
import sys
import threading

import psutil
import pytest

from diagnostics.probes.fxrace import environments
from diagnostics.probes.fxrace.environments import Offer, Unavailable, Wheel, Workshop


@pytest.fixture
def said():
    return []


@pytest.fixture
def workshop(fake_python, said):
    return Workshop(str(fake_python.path), said.append)


def entries():
    return sorted(p.name for p in environments.cache_dir().iterdir() if p.suffix != ".lock")


def test_an_environment_is_made_once_and_is_private(workshop, fake_python, said):
    fake_python.offers("2.13.0", "sympy", resolved="2.13.0+cpu")
    assert workshop.made("2.13.0") is None
    offer = workshop.offer("2.13.0")
    python = workshop.make("2.13.0", offer)
    assert python == environments.cache_dir() / "torch-2.13.0-py311-cpu" / "bin" / "python"
    assert workshop.made("2.13.0") == workshop.make("2.13.0", offer) == python
    assert len(fake_python.calls("venv")) == 1
    assert fake_python.calls("--no-compile")[0][-1] == "torch==2.13.0+cpu"
    for directory in (environments.cache_dir(), python.parents[1]):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert said == ["making an environment: torch 2.13.0+cpu, a CPU build: 2 files, all on disk"]


def test_asking_downloads_nothing(workshop, fake_python):
    fake_python.offers("2.13.0")
    workshop.offer("2.13.0")
    assert all("--dry-run" in call for call in fake_python.calls("install"))
    assert entries() == []


def wheels(*names, url="https://index.invalid/x.whl", size_mib=400.0):
    return tuple(Wheel(name, url, size_mib) for name in names)


@pytest.mark.parametrize(
    ("found", "asks"),
    [
        (wheels("torch"), False),  # a CPU build
        (wheels("torch", "sympy", size_mib=None), False),
        (wheels("torch", "nvidia-cublas"), True),
        (wheels("torch", "triton", size_mib=None), True),
        (wheels("torch", "cuda-toolkit", url="file:///x.whl"), False),  # on disk
        (wheels("torch", "nvidia-cublas", size_mib=100.0), False),  # small
    ],
)
def test_only_a_large_download_of_a_cuda_build_needs_consent(found, asks):
    assert Offer("2", found).needs_consent is asks


def test_what_would_be_downloaded_is_said():
    offer = Offer("2.12.1", (*wheels("torch", "nvidia-cublas"), *wheels("sympy", url="file:///s")))
    assert str(offer) == (
        "torch 2.12.1, a CUDA build: 3 files, 2 of them to download, 800 MiB, from index.invalid"
    )
    unknown = Offer("2", wheels("torch", "triton", size_mib=None))
    assert "of unknown size" in str(unknown)


def test_a_server_that_does_not_answer_leaves_the_size_unknown(workshop, fake_python):
    fake_python.offers("2.12.1", "nvidia-cublas", local=False)
    offer = workshop.offer("2.12.1")
    assert offer.download_mib is None
    assert offer.needs_consent


def test_pips_own_reason_is_shown(workshop):
    with pytest.raises(Unavailable, match=r"^torch 9\.9: asking pip: No torch like that$"):
        workshop.offer("9.9")


def test_the_versions_are_read_as_pip_lists_them(workshop, fake_python):
    (fake_python.state / "index").write_text("Available versions: 2.14.1, 2.13.0+cpu, 2.13.0\n  x")
    assert workshop.offered() == ["2.14.1", "2.13.0+cpu", "2.13.0"]
    (fake_python.state / "index").write_text("nothing\n")
    assert workshop.offered() == []


@pytest.mark.parametrize("command", ["/nowhere/python", "/"])
def test_an_interpreter_that_cannot_be_run_is_named(command, fake_python):
    with pytest.raises(Unavailable, match=f"--python {command}: cannot be run"):
        Workshop(command, lambda _line: None)


@pytest.mark.parametrize(("pip", "has"), [("", "no pip"), ("21.2.4", r"pip 21\.2\.4")])
def test_an_interpreter_without_a_usable_pip_is_refused(fake_python, pip, has):
    (fake_python.state / "pip").write_text(pip)
    with pytest.raises(
        Unavailable, match=rf"has {has}, and it takes 22\.3\. Type: .* -m ensurepip"
    ):
        Workshop(str(fake_python.path), lambda _line: None)


def test_an_installation_that_fails_leaves_nothing(workshop, fake_python):
    fake_python.offers("2.13.0")
    (fake_python.state / "fail").touch()
    with pytest.raises(Unavailable, match=r"installing: disk full at https://\*\*\*@index"):
        workshop.make("2.13.0", workshop.offer("2.13.0"))
    assert entries() == []
    (fake_python.state / "fail").unlink()
    assert workshop.make("2.13.0", workshop.offer("2.13.0")).exists()


def test_a_torch_that_cannot_be_imported_is_not_kept(workshop, fake_python):
    fake_python.offers("2.13.0")
    (fake_python.state / "import").write_text("OSError: libcudart.so.13")
    with pytest.raises(Unavailable, match="first import: OSError: libcudart"):
        workshop.make("2.13.0", workshop.offer("2.13.0"))
    assert entries() == []


def hanging_installation(fake_python):
    fake_python.offers("2.13.0")
    (fake_python.state / "hang").touch()


def assert_gone(fake_python):
    """pip was killed, and its half environment removed."""
    assert entries() == []
    assert not psutil.pid_exists(int((fake_python.state / "pid").read_text()))


def test_an_installation_that_hangs_is_killed_at_its_deadline(workshop, fake_python, monkeypatch):
    hanging_installation(fake_python)
    monkeypatch.setattr(environments, "INSTALL_S", 4.0)
    with pytest.raises(Unavailable, match="installing: gave up after 4 s"):
        workshop.make("2.13.0", workshop.offer("2.13.0"))
    assert_gone(fake_python)


def test_ctrl_c_leaves_no_half_environment(fake_python, monkeypatch):
    def show(line):
        if "installing" in line and (fake_python.state / "pid").exists():
            raise KeyboardInterrupt

    hanging_installation(fake_python)
    workshop = Workshop(str(fake_python.path), show)
    offer = workshop.offer("2.13.0")
    monkeypatch.setattr(environments, "TICK_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        workshop.make("2.13.0", offer)
    assert_gone(fake_python)


def test_what_a_killed_run_left_is_made_anew(workshop, fake_python):
    fake_python.offers("2.13.0")
    partial = environments.cache_dir() / ".torch-2.13.0-py311-cpu.partial"
    (partial / "bin").mkdir(parents=True)
    orphan = environments.cache_dir() / "torch-2.13.0-py311-cpu"
    (orphan / "bin").mkdir(parents=True)
    (orphan / "bin" / "python").symlink_to("/nowhere/python")  # its interpreter was removed
    assert workshop.made("2.13.0") is None
    assert workshop.make("2.13.0", workshop.offer("2.13.0")).exists()
    assert entries() == ["torch-2.13.0-py311-cpu"]


def test_two_at_once_make_one_environment(fake_python):
    fake_python.offers("2.13.0")
    waiting = threading.Event()
    workshop = Workshop(str(fake_python.path), lambda line: "waiting" in line and waiting.set())
    offer, made = workshop.offer("2.13.0"), []
    lock = environments.cache_dir() / ".torch-2.13.0-py311-cpu.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threads = [
            threading.Thread(target=lambda: made.append(workshop.make("2.13.0", offer)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert waiting.wait(20)
    for thread in threads:
        thread.join(20)
    assert len(made) == 2
    assert len(fake_python.calls("venv")) == 1


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert environments.cache_dir() == tmp_path / ".cache" / "dflash-diag"


def test_this_interpreter_has_what_is_asked_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    workshop = Workshop(sys.executable, lambda _line: None)
    assert workshop._tag == f"py{sys.version_info[0]}{sys.version_info[1]}"
