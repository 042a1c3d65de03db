"""The `gpu` marker: skipped with a reason without CUDA, a failure where a GPU is promised."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
GPU_TEST = "import pytest\n@pytest.mark.gpu\ndef test_on_gpu(): pass\n"
PLAIN_TEST = "import sys\ndef test_plain(): assert 'torch' not in sys.modules\n"
TWO_GPUS = "import pytest\n@pytest.mark.gpu(2)\ndef test_on_two(): pass\n"
TORCH = (
    "__version__ = '9.9'\nclass cuda:\n    is_available = staticmethod(lambda: {cuda})\n"
    "    device_count = staticmethod(lambda: 1)\n"
)


@pytest.fixture
def run_child(tmp_path):
    """A child pytest beside a stand-in for torch that has, or has not, CUDA."""

    def run(test, cuda, **environ):
        (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
        (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\npythonpath = .\n")
        (tmp_path / "test_it.py").write_text(test)
        command = [sys.executable, "-m", "pytest", "-rsfE", "-p", "no:cacheprovider"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    return run


def test_without_cuda_a_gpu_test_is_skipped_with_the_reason(run_child):
    code, output = run_child(GPU_TEST, cuda=False)
    assert code == 0
    assert "1 skipped" in output
    assert "needs CUDA: none seen by torch 9.9" in output


def test_where_a_gpu_is_required_a_gpu_test_without_one_fails(run_child):
    code, output = run_child(GPU_TEST, cuda=False, DFLASH_REQUIRE_GPU="1")
    assert code == 1
    assert "DFLASH_REQUIRE_GPU=1, but this test needs CUDA: none seen by torch 9.9" in output


@pytest.mark.parametrize("environ", [{}, {"DFLASH_REQUIRE_GPU": "1"}])
def test_with_cuda_a_gpu_test_runs(run_child, environ):
    code, output = run_child(GPU_TEST, cuda=True, **environ)
    assert code == 0
    assert "1 passed" in output


def test_torch_is_not_imported_for_other_tests(run_child):
    code, output = run_child(PLAIN_TEST, cuda=True, DFLASH_REQUIRE_GPU="1")
    assert code == 0, output


@pytest.mark.parametrize(("promised", "code"), [("1", 0), ("2", 1)])
def test_on_one_gpu_a_test_for_two_is_skipped_unless_two_were_promised(run_child, promised, code):
    got, output = run_child(TWO_GPUS, cuda=True, DFLASH_REQUIRE_GPU=promised)
    assert got == code
    assert "needs 2 GPUs: 1 seen" in output
