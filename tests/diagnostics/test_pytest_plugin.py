"""The plugin as another project uses it: a child pytest, real probes, a control that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def outcome(tmp_path):
    """Run a test file under the plugin; its exit code and output."""

    def run(text):
        (tmp_path / "test_it.py").write_text("import pytest\n" + text)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-rs", "--strict-markers"),
                *("-p", "diagnostics.pytest_plugin", "-p", "no:cacheprovider"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_probe_that_finds_nothing_passes(outcome):
    code, said = outcome('@pytest.mark.dflash_probe("env")\ndef test_env(): pass\n')
    assert code == 0, said


@pytest.fixture
def manifest(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("a = 1\n")
    command = [sys.executable, "-m", "diagnostics", "deploy-check", "write"]
    path = tmp_path / "manifest.json"
    subprocess.run([*command, str(package), str(path)], check=True, timeout=60)
    return path, package


MARKED = '@pytest.mark.dflash_probe("deploy-check", "verify", "{}", "{}"{})\ndef test_it(): pass\n'


def test_a_finding_fails_with_its_words(outcome, manifest):
    path, package = manifest
    assert outcome(MARKED.format(path, package, ""))[0] == 0  # the control
    (package / "a.py").write_text("a = 2\n")
    code, said = outcome(MARKED.format(path, package, ""))
    assert code == 1
    assert "other-code: here holds other code than the manifest: 1 differ" in said


def test_what_could_not_be_checked_never_passes(outcome, manifest):
    path, _ = manifest
    code, said = outcome(MARKED.format(path, "/nonexistent", ""))
    assert code == 1
    assert "could not check: " in said
    code, said = outcome(MARKED.format(path, "/nonexistent", ', unknown="skip"'))
    assert code == 0
    assert "1 skipped" in said and "could not check: " in said


def test_wrong_words_are_an_error(outcome):
    code, said = outcome('@pytest.mark.dflash_probe("env", "--no-such")\ndef test_it(): pass\n')
    assert code != 0
    assert "No such option" in said


def test_the_fixture_gives_the_verdict(outcome):
    code, said = outcome(
        "def test_it(dflash_probe):\n"
        "    assert dflash_probe('env')['code'] == 'environment-consistent'\n"
    )
    assert code == 0, said
