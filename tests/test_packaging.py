"""The wheel, installed without extras in an empty environment: what a diagnosing user gets."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy so that nothing is written into the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("dflash", "diagnostics", "repro"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    run([*PIP, "wheel", "--no-build-isolation", "--no-deps", "-w", source / "dist", source])
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel and its base dependencies, and nothing else.

    The dependencies are copied from the running environment, so that no index is needed; pip then
    refuses to install the wheel unless they are all that it asks for.
    """
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    (site,) = directory.glob("lib/python*/site-packages")
    for name in base_dependencies("dflash-diag", wheel_requirements(wheel)):
        copy_distribution(name, site)
    run([*PIP, "--python", python, "install", "--no-index", wheel])
    return directory


def run(command, cwd=None):
    """Run to success without this process's PYTHONPATH."""
    done = call(command, cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call(command, cwd=None):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


def wheel_requirements(wheel):
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    return distribution.requires


def base_dependencies(name, requires):
    """The names of all distributions that `requires` needs without extras, however indirectly."""
    found = set()
    for requirement in map(Requirement, requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(requirement.name)
            found |= base_dependencies(
                requirement.name, importlib.metadata.requires(requirement.name)
            )
    return found


def copy_distribution(name, site):
    """Copy an installed distribution's files below site-packages."""
    for file in importlib.metadata.files(name):
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


def test_the_wheel_holds_our_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {
        "dflash",
        "diagnostics",
        "dflash_diag",
    }
    modules = {str(p.relative_to(ROOT)) for n in ("dflash", "diagnostics") for p in sources(n)}
    reproducers = {f"diagnostics/{p.relative_to(ROOT)}" for p in sources("repro")}
    assert {name for name in names if name.endswith(".py")} == modules | reproducers


def sources(package):
    return (ROOT / package).rglob("*.py")


def test_the_diagnostics_run_without_torch(environment, tmp_path):
    dflash_diag = environment / "bin" / "dflash-diag"
    assert "env" in run([dflash_diag, "--help"], tmp_path)
    verdict = json.loads(run([dflash_diag, "env", "--json"], tmp_path))
    assert verdict["status"] == "ok"
    assert verdict["evidence"]["torch"] == "not installed"
    assert verdict["evidence"]["git"] == "not a git checkout"
    assert verdict["evidence"]["dflash"].startswith(str(environment))
    assert "dflash-diag" in run([dflash_diag, "--version"], tmp_path)


def test_training_names_the_extra_that_is_missing(environment, tmp_path):
    required = ["--target-model", ".", "--data-dir", ".", "--output-dir", "out"]
    done = call([environment / "bin" / "dflash", "train", *required], tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("Type: pip install 'dflash-diag[train]'\n"), done.stderr


def test_a_config_can_be_checked_without_torch(environment, tmp_path):
    required = ["--target-model", "t", "--data-dir", "d", "--output-dir", "o"]
    assert "[model]" in run([environment / "bin" / "dflash", "config", *required], tmp_path)


def test_a_wheel_that_takes_over_dflash_is_named(environment, tmp_path, fake_distribution):
    stranger = tmp_path / "site"
    fake_distribution(stranger, "dflash", "0.9.1", ("dflash/__init__.py",))
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); import diagnostics.__main__"
    python = environment / "bin" / "python"
    done = call([python, "-c", command, stranger, "env", "--json"], tmp_path)
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["code"] == "import-name-owned-twice"
    assert "dflash 0.9.1" in verdict["summary"]
    assert str(stranger / "dflash" / "__init__.py") in verdict["summary"]
    assert "pip uninstall dflash;" in verdict["remedy"]
