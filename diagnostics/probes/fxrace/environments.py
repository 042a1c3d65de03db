"""Environments with one torch each, made on demand by pip and kept in the user's cache directory.

What pip would take is asked first (`pip install --dry-run --report`), which downloads no torch.
Where pip looks is the user's configuration: `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`
makes it find CPU builds, which are a tenth of the size.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from diagnostics.redact import redact

# Less than this is downloaded without a question.
UNASKED_MIB = 300
# What only a build for accelerators depends on.
ACCELERATED = ("nvidia-", "cuda-", "triton", "pytorch-triton")
TICK_S = 15.0
ASK_S, MAKE_S, INSTALL_S, HEAD_S = 180.0, 120.0, 3600.0, 10.0
OLDEST_PIP = Version("22.3")  # the first with --python
WHO = """
import importlib.metadata as metadata, sys
print("py%d%d" % sys.version_info[:2], *(d.version for d in metadata.distributions(name="pip")))
"""
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


class Unavailable(RuntimeError):
    """This torch cannot be had, or its environment could not be made; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """A file that pip would take; `size_mib` is None if nobody says it."""

    name: str
    url: str
    size_mib: float | None

    @property
    def is_local(self) -> bool:
        """Whether it lies on disk already."""
        return self.url.startswith("file:")


@dataclass(frozen=True)
class Offer:
    """What pip would install for one version of torch, which may be `2.13.0+cpu` for 2.13.0."""

    version: str
    wheels: tuple[Wheel, ...]

    @property
    def is_cpu(self) -> bool:
        """Whether it is a build without CUDA."""
        return not any(wheel.name.startswith(ACCELERATED) for wheel in self.wheels)

    @property
    def download_mib(self) -> float | None:
        """What is not on disk yet; None if a size is unknown."""
        sizes = [wheel.size_mib for wheel in self.wheels if not wheel.is_local]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def needs_consent(self) -> bool:
        """Whether so much would be downloaded that a person should be asked."""
        small = self.download_mib is not None and self.download_mib <= UNASKED_MIB
        return not (self.is_cpu or small)

    def __str__(self) -> str:
        remote = [wheel for wheel in self.wheels if not wheel.is_local]
        build = "CPU" if self.is_cpu else "CUDA"
        says = f"torch {self.version}, a {build} build: {len(self.wheels)} files"
        if not remote:
            return f"{says}, all on disk"
        size = "of unknown size" if self.download_mib is None else f"{self.download_mib:.0f} MiB"
        hosts = sorted({urllib.parse.urlsplit(wheel.url).hostname or "?" for wheel in remote})
        return f"{says}, {len(remote)} of them to download, {size}, from {', '.join(hosts)}"


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/dflash-diag`, made private to the user."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    directory = (base if base.is_absolute() else Path.home() / ".cache") / "dflash-diag"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


class Workshop:
    """Makes environments with one interpreter, and says on `show` what it does."""

    def __init__(self, python: str, show: Callable[[str], None]) -> None:
        """Raises Unavailable if `python` is no Python with a pip that is new enough."""
        self._python, self._show = python, show
        said = self._run([python, "-c", WHO], f"--python {python}", ASK_S)
        self._tag, _, pip = said.strip().partition(" ")
        if not pip or Version(pip) < OLDEST_PIP:
            raise Unavailable(
                f"--python {python}: has {f'pip {pip}' if pip else 'no pip'}, and it takes "
                f"{OLDEST_PIP}. Type: {python} -m ensurepip --upgrade, or name another interpreter"
            )

    def offer(self, version: str) -> Offer:
        """Ask pip. Raises Unavailable with pip's reason; takes seconds and downloads no torch."""
        command = [self._python, *PIP, "install", "--dry-run", "--ignore-installed", "--report"]
        out = self._run([*command, "-", f"torch=={version}"], f"torch {version}: asking pip", ASK_S)
        items = json.loads(out)["install"]
        (torch,) = (i["metadata"] for i in items if i["metadata"]["name"] == "torch")
        return Offer(torch["version"], tuple(map(_wheel, items)))

    def offered(self) -> list[str]:
        """Every version of torch that pip finds for this interpreter, as pip lists them."""
        # --quiet would leave out the list itself.
        command = [self._python, *PIP[:-1], "index", "versions", "torch"]
        out = self._run(command, "asking pip for the versions of torch", ASK_S)
        listed = (line for line in out.splitlines() if line.startswith("Available versions:"))
        return [
            one.strip() for one in next(listed, ":").partition(":")[2].split(",") if one.strip()
        ]

    def made(self, version: str) -> Path | None:
        """The python of an environment that is complete already, CPU builds first."""
        for name in (f"torch-{version}-{self._tag}-cpu", f"torch-{version}-{self._tag}"):
            python = cache_dir() / name / "bin" / "python"
            if python.exists():  # not if the interpreter that it was made with has gone
                return python
        return None

    def make(self, version: str, offer: Offer) -> Path:
        """The python of an environment with this torch, made if it is not there yet.

        It gets its name when it is complete, so that whatever interrupts this leaves nothing that
        looks complete. Raises Unavailable.
        """
        name = f"torch-{version}-{self._tag}" + ("-cpu" if offer.is_cpu else "")
        directory, partial = cache_dir() / name, cache_dir() / f".{name}.partial"
        with self._lock(name):
            if made := self.made(version):  # by the one who held the lock
                return made
            for stale in (partial, directory):
                shutil.rmtree(stale, ignore_errors=True)
            try:
                self._fill(partial, offer)
                partial.rename(directory)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return directory / "bin" / "python"

    def _fill(self, directory: Path, offer: Offer) -> None:
        self._show(f"making an environment: {offer}")
        directory.mkdir(mode=0o700)
        python, what = str(directory / "bin" / "python"), f"torch {offer.version}"
        venv = [self._python, "-m", "venv", "--without-pip", str(directory)]
        self._run(venv, f"{what}: making the environment", MAKE_S)
        # Nothing is compiled ahead: torch has far more modules than a reproducer imports.
        install = [self._python, *PIP, "--python", python, "install", "--no-compile"]
        self._run([*install, f"torch=={offer.version}"], f"{what}: installing", INSTALL_S)
        self._run([python, "-W", "ignore", "-c", "import torch"], f"{what}: first import", MAKE_S)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with (cache_dir() / f".{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._show(f"{name}: waiting for another dflash-diag that is making it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file unlocks it, and so does the end of a killed process

    def _run(self, command: Sequence[str], what: str, timeout_s: float) -> str:
        """The command's output; says every TICK_S seconds that it is still running."""
        started_s = time.monotonic()
        child = _start(command)
        try:
            while True:
                left_s = timeout_s - (time.monotonic() - started_s)
                try:
                    out, err = child.communicate(timeout=max(0.0, min(left_s, TICK_S)))
                    break
                except subprocess.TimeoutExpired:
                    if left_s <= TICK_S:
                        raise Unavailable(f"{what}: gave up after {timeout_s:g} s") from None
                    self._show(f"{what}: {time.monotonic() - started_s:.0f} s")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if child.returncode:
            raise Unavailable(f"{what}: {_reason(err)}")
        return out


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a process group of its own, and without what would bring our modules into its Python."""
    environ = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            cwd=cache_dir(),
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"--python {command[0]}: cannot be run: {error.strerror}") from error


def _reason(err: str) -> str:
    """pip's first error says what, and its later ones where to read about errors."""
    lines = [line for line in err.splitlines() if line.strip()] or ["no message"]
    errors = (line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: "))
    return redact(next(errors, lines[-1]))[:200]


def _wheel(item: dict[str, Any]) -> Wheel:
    url = item["download_info"]["url"]
    return Wheel(item["metadata"]["name"], url, _size_mib(url))


def _size_mib(url: str) -> float | None:
    """By asking for the head of the file only; pip's report has no sizes."""
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(urllib.request.url2pathname(parts.path)).stat().st_size / 2**20
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_S) as answer:
            return int(answer.headers["Content-Length"]) / 2**20
    except (OSError, ValueError, TypeError):  # unreachable; no URL; no length given
        return None
