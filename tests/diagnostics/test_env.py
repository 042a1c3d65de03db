"""The probe `env`: shows which code would run, and names a stranger in its place."""

import json
import sys

import pytest
from click.testing import CliRunner

from diagnostics.cli import main
from diagnostics.probes import env
from diagnostics.verdict import Status


@pytest.fixture
def only_path(tmp_path, monkeypatch):
    """Sets the whole import path, and forgets that `dflash` has been imported already."""

    def set_path(*directories):
        monkeypatch.setattr("sys.path", list(map(str, directories)))
        # An editable install finds its packages without sys.path.
        finders = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
        monkeypatch.setattr("sys.meta_path", finders)
        for name in ("dflash", "diagnostics"):
            monkeypatch.delitem(sys.modules, name, raising=False)

    return set_path


def test_a_consistent_environment_is_ok(only_path):
    only_path(env._DFLASH_DIR.parent)
    verdict = env.probe()
    assert verdict.status is Status.OK
    assert verdict.evidence["dflash"] == str(env._DFLASH_DIR / "__init__.py")
    assert verdict.evidence["python"].startswith(sys.executable)
    assert verdict.evidence["torch"] == "not installed"


def test_a_second_owner_is_a_problem_with_the_remedy(only_path, tmp_path, fake_distribution):
    fake_distribution(tmp_path, "dflash", "0.9.1", ("dflash/__init__.py",))
    only_path(tmp_path, env._DFLASH_DIR.parent)
    verdict = env.probe()
    assert verdict.status is Status.PROBLEM
    assert verdict.code == "import-name-owned-twice"
    assert "dflash 0.9.1" in verdict.summary
    assert f"takes {tmp_path}/dflash/__init__.py" in verdict.summary
    assert "pip uninstall dflash;" in verdict.remedy


def test_a_copy_that_comes_first_on_the_path_is_a_problem(only_path, tmp_path):
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / "__init__.py").touch()
    only_path(tmp_path, env._DFLASH_DIR.parent)
    verdict = env.probe()
    assert verdict.status is Status.PROBLEM
    assert verdict.code == "dflash-from-elsewhere"
    assert str(tmp_path) in verdict.summary
    assert "PYTHONPATH" in verdict.remedy


def test_a_dflash_that_cannot_be_imported_is_a_problem(only_path, tmp_path):
    only_path(tmp_path)
    assert env.probe().code == "dflash-from-elsewhere"


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"]])
def test_the_command_prints_the_verdict_and_exits_with_its_code(arguments, only_path):
    only_path(env._DFLASH_DIR.parent)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    if "--json" in arguments:
        assert json.loads(result.stdout)["code"] == "environment-consistent"
    else:
        assert result.stdout.startswith("ok: `import dflash` takes ")


def test_the_probes_docstring_is_the_commands_help():
    text = CliRunner().invoke(main, ["env", "--help"]).stdout
    assert "Show which code would run" in text
    assert "3 could not check" in text
