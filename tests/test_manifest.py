"""The manifest: what code runs, and who else claims its import names."""

import json
import subprocess

import pytest

from dflash import manifest
from dflash.manifest import collect, double_owners, git_state, import_owners, package_hash


@pytest.fixture
def package(tmp_path):
    directory = tmp_path / "package"
    (directory / "inner").mkdir(parents=True)
    (directory / "__init__.py").write_text("A = 1\n")
    (directory / "inner" / "b.py").write_text("B = 2\n")
    return directory


def git(directory, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


def test_the_hash_changes_with_content_and_names_only(package):
    before = package_hash(package)
    (package / "inner" / "b.pyc").write_bytes(b"compiled")
    assert package_hash(package) == before
    (package / "inner" / "b.py").write_text("B = 3\n")
    changed = package_hash(package)
    assert changed != before
    (package / "inner" / "b.py").rename(package / "inner" / "c.py")
    assert package_hash(package) not in (before, changed)


def test_the_hash_is_that_of_a_copy(package, tmp_path):
    copy = package.rename(tmp_path / "elsewhere")
    hashed = package_hash(copy)
    assert package_hash(copy.rename(package)) == hashed


def test_git_state_names_the_commit_and_changes(package):
    assert git_state(package) == "not a git checkout"
    git(package.parent, "init")
    assert git_state(package) == "not a git checkout"  # below a checkout, but not part of it
    git(package.parent, "add", ".")
    assert git_state(package) == "no commit yet-dirty"
    git(package.parent, "commit", "-m", "first")
    clean = git_state(package)
    assert len(clean) >= 7
    assert int(clean, 16) >= 0
    (package / "__init__.py").write_text("A = 2\n")
    assert git_state(package) == f"{clean}-dirty"


def test_git_state_without_git_is_unknown(package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_state(package) == "unknown (no git command)"


def test_git_state_of_a_wedged_git_is_unknown(package, monkeypatch):
    def hang(*arguments, timeout, **options):
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert git_state(package) == "unknown (git took more than 5 s)"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The only directory on the path: what is installed there is all that is installed."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.setattr("sys.path", [str(directory)])
    return directory


def test_a_second_distribution_with_our_import_name_is_named(site, fake_distribution):
    fake_distribution(site, "dflash-diag", "0.1.0", ("dflash/cli.py", "diagnostics/cli.py"))
    fake_distribution(site, "dflash", "0.9.1", ("dflash/__init__.py", "dflash/cli.py"))
    assert import_owners("dflash") == ["dflash 0.9.1", "dflash-diag 0.1.0"]
    (found,) = double_owners()
    assert found.name == "dflash"
    assert "dflash-diag 0.1.0" in str(found)
    assert "dflash 0.9.1" in str(found)
    assert str(manifest.PACKAGE_DIR) in str(found)  # what this process imports
    assert found.remedy.startswith("Type: pip uninstall dflash;")


@pytest.mark.parametrize("name", manifest.IMPORT_NAMES)
def test_each_of_our_names_is_watched(site, fake_distribution, name):
    fake_distribution(site, "stranger", "3", (f"{name}/__init__.py",))
    assert [found.others for found in double_owners()] == [("stranger 3",)]
    assert double_owners(set(manifest.IMPORT_NAMES) - {name}) == []


def test_a_module_file_is_an_owner_and_a_longer_name_is_not(site, fake_distribution):
    fake_distribution(site, "single", "1", ("repro.py",))
    fake_distribution(site, "other", "1", ("dflash_extra/__init__.py", "lib/dflash/__init__.py"))
    assert [found.name for found in double_owners()] == ["repro"]


def test_an_editable_install_is_not_a_double(site, fake_distribution):
    files = ("__editable__.dflash_diag-0.1.0.pth", "__editable___dflash_diag_0_1_0_finder.py")
    fake_distribution(site, "dflash-diag", "0.1.0", files)
    assert double_owners() == []


def test_our_own_files_and_stale_metadata_are_not_a_double(site, fake_distribution):
    fake_distribution(site, "dflash_diag", "0.0.9", ("dflash/cli.py",))
    fake_distribution(site, "dflash-diag", "0.1.0", ("dflash/cli.py",))
    assert double_owners() == []


def test_the_first_line_says_what_runs(site, fake_distribution):
    fake_distribution(site, "dflash-diag", "0.1.0")
    fake_distribution(site, "torch", "2.99.0")
    collected = collect("c" * 64)
    line = collected.first_line()
    assert "\n" not in line
    assert line.startswith("dflash 0.1.0 | git ")
    assert f"| code {package_hash(manifest.PACKAGE_DIR)[:12]} | {manifest.PACKAGE_DIR} |" in line
    assert "| config cccccccccccc |" in line
    assert line.endswith("| torch 2.99.0 | transformers not installed")
    assert json.loads(collected.to_json()).keys() == {
        "version",
        "git",
        "code_hash",
        "import_path",
        "config_hash",
        "python",
        "torch",
        "transformers",
    }
