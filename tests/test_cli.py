"""The `dflash` command: what it checks before torch, what it hands on, what it exits with."""

import subprocess
import sys
import time
import types

import pytest
from click.testing import CliRunner

from dflash import __version__, before_torch
from dflash.before_torch import missing_extra, share_cores
from dflash.cli import main
from dflash.config import TrainConfig
from dflash.errors import DflashError, Exit, MissingExtraError
from dflash.manifest import DoubleOwner

HEAVY = ("torch", "transformers", "numpy", "pyarrow", "rich")
RUN_AND_LIST_MODULES = """
import runpy, sys
sys.argv = [sys.argv[1], *sys.argv[2:]]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
finally:
    print("heavy:", [name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["dflash", "--help"],
        ["dflash", "train", "--help"],
        ["dflash", "evaluate", "--help"],
        ["diagnostics", "--help"],
    ],
)
def test_help_imports_nothing_heavy(command):
    code = RUN_AND_LIST_MODULES.format(heavy=HEAVY)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    print(f"{' '.join(command)}: {time.perf_counter() - start:.2f} s with the interpreter's start")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "heavy: []\n"


@pytest.fixture
def arguments(tmp_path):
    """`train` with directories that exist."""
    (tmp_path / "target").mkdir()
    (tmp_path / "data").mkdir()
    paths = {"--target-model": "target", "--data-dir": "data", "--output-dir": "out"}
    return ["train", *(word for flag, p in paths.items() for word in (flag, str(tmp_path / p)))]


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for dflash.trainer; its `train` may be replaced."""
    module = types.ModuleType("dflash.trainer")
    module.train = lambda config: Exit.OK
    monkeypatch.setitem(sys.modules, "dflash.trainer", module)
    monkeypatch.setattr(before_torch, "double_owners", lambda names: [])
    return module


def test_train_hands_the_config_on_and_exits_with_the_trainers_code(arguments, trainer):
    seen = []
    trainer.train = lambda config: seen.append(config) or Exit.STOPPED
    result = CliRunner().invoke(main, [*arguments, "--seed", "7"])
    assert result.exit_code == Exit.STOPPED
    (config,) = seen
    assert isinstance(config, TrainConfig)
    assert config.data.seed == 7


@pytest.mark.parametrize("option", ["--target-model", "--data-dir"])
def test_a_missing_directory_is_found_before_anything_is_loaded(arguments, trainer, option):
    trainer.train = lambda config: pytest.fail("must not start")
    result = CliRunner().invoke(main, [*arguments, option, "/nowhere"])
    assert result.exit_code == Exit.USAGE
    assert f"Error: {option} must be an existing directory, got /nowhere\n" in result.stderr


def test_an_error_is_shown_with_its_remedy_and_without_a_traceback(arguments, trainer):
    def fail(config):
        raise DflashError("the file is torn", remedy="Type: mend it")

    trainer.train = fail
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.FAILED
    assert result.stderr == "Error: the file is torn\nType: mend it\n"


def test_an_interrupt_before_the_trainer_listens_exits_130(arguments, trainer):
    def interrupt(config):
        raise KeyboardInterrupt

    trainer.train = interrupt
    assert CliRunner().invoke(main, arguments).exit_code == Exit.INTERRUPTED


def test_train_refuses_an_import_name_with_two_owners(arguments, trainer, monkeypatch):
    other = DoubleOwner("dflash", ("dflash 0.1.0",), "/site/dflash/__init__.py")
    monkeypatch.setattr(before_torch, "double_owners", lambda names: [other])
    trainer.train = lambda config: pytest.fail("must not start")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == Exit.FAILED
    assert "dflash 0.1.0" in result.stderr
    assert "/site/dflash/__init__.py" in result.stderr
    assert "pip uninstall dflash" in result.stderr


def cpu_config(target_gpus, drafter_gpus):
    return TrainConfig.from_dict(
        {
            "model": {"target-model": "t"},
            "data": {"data-dir": "d"},
            "run": {"output-dir": "o"},
            "devices": {"target-gpus": target_gpus, "drafter-gpus": drafter_gpus},
        }
    )


@pytest.mark.parametrize(
    ("drafters", "cores", "threads"), [("cpu", 8, "4"), ("cpu,cpu", 8, "2"), ("cpu,cpu", 2, "1")]
)
def test_the_stage_threads_of_a_cpu_run_share_the_cores(drafters, cores, threads):
    environ = {}
    note = share_cores(cpu_config("cpu", drafters), environ, cores)
    assert environ == {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    assert note.startswith(f"OMP_NUM_THREADS={threads} OMP_WAIT_POLICY=passive: {cores} cores")


def test_the_users_thread_count_and_wait_policy_stand():
    environ = {"OMP_NUM_THREADS": "3"}
    assert share_cores(cpu_config("cpu", "cpu"), environ, 8) is None
    assert environ == {"OMP_NUM_THREADS": "3"}
    environ = {"OMP_WAIT_POLICY": "active"}
    assert "OMP_WAIT_POLICY=active" in share_cores(cpu_config("cpu", "cpu"), environ, 8)


def test_a_run_with_a_gpu_is_left_alone():
    environ = {}
    assert share_cores(cpu_config("0", "cpu"), environ, 8) is None
    assert environ == {}


def test_a_missing_package_names_the_extra_but_our_own_missing_module_does_not():
    absent = missing_extra("train", ModuleNotFoundError(name="torch.cuda"))
    assert isinstance(absent, MissingExtraError)
    assert "'torch'" in str(absent)
    assert absent.remedy == "Type: pip install 'dflash-diag[train]'"
    bug = ModuleNotFoundError(name="dflash.typo")
    assert missing_extra("train", bug) is bug


def test_version():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"dflash, version {__version__}\n"
