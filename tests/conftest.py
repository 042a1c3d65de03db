"""One torch thread per test process, and GPU tests that never vanish unnoticed."""

import os
from pathlib import Path

# Before anything imports torch: OpenMP teams of parallel test processes spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where CUDA is missing; fail it where a GPU is promised."""
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        if os.environ.get("DFLASH_REQUIRE_GPU") == "1":
            pytest.fail(f"DFLASH_REQUIRE_GPU=1, but this test {reason}", pytrace=False)
        pytest.skip(reason)


def why_no_gpu() -> str | None:
    """Why GPU tests cannot run here, or None; imports torch, so call it for a GPU test only."""
    try:
        import torch
    except ImportError as error:
        return f"needs CUDA: {error}"
    return (
        None if torch.cuda.is_available() else f"needs CUDA: none seen by torch {torch.__version__}"
    )


@pytest.fixture
def fake_distribution():
    """A function that records an installed distribution with the given files in a directory."""

    def install(site: Path, name: str, version: str, files: tuple[str, ...] = ()) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).touch()

    return install
