"""One torch thread per test process, GPU tests that never vanish unnoticed, small models."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

# Before anything imports torch: OpenMP teams of parallel test processes spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest


def pytest_configure() -> None:
    """Take Ctrl-C, and let the tests' children take it, also where the shell has it ignored.

    A shell starts what runs in the background with SIGINT ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where GPUs are missing; fail it where DFLASH_REQUIRE_GPU promises so many."""
    marker = item.get_closest_marker("gpu")
    count = marker.args[0] if marker and marker.args else 1
    if marker and (reason := why_no_gpu(count)):
        promised = int(os.environ.get("DFLASH_REQUIRE_GPU") or 0)
        if promised >= count:
            pytest.fail(f"DFLASH_REQUIRE_GPU={promised}, but this test {reason}", pytrace=False)
        pytest.skip(reason)


def why_no_gpu(count: int) -> str | None:
    """Why tests on so many GPUs cannot run here, or None; imports torch: call it for those only."""
    try:
        import torch
    except ImportError as error:
        return f"needs CUDA: {error}"
    if not torch.cuda.is_available():
        return f"needs CUDA: none seen by torch {torch.__version__}"
    seen = torch.cuda.device_count()
    return f"needs {count} GPUs: {seen} seen" if seen < count else None


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


@pytest.fixture(scope="session")
def tiny_target_dir():
    """A Qwen3 of 1.3 M parameters, trained on the standard library's sources."""
    return Path(__file__).parent / "fixtures" / "tiny-qwen3"


@pytest.fixture(scope="session")
def tiny_model(tiny_target_dir):
    """That model in float32. Every test of the process has the same one: do not change it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_target_dir, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target_dir, local_files_only=True)


@pytest.fixture(scope="session")
def hybrid_model():
    """A random Qwen3.5 text model: three layers of four mix tokens by a recurrent state."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)).eval()
    for module in model.modules():
        if hasattr(module, "A_log"):
            # Decay slowly: what an early token leaves in the state must reach the last one.
            module.A_log.data.fill_(-4.0)
    return model


@pytest.fixture(scope="session")
def small_sizes():
    """Sizes of a random target, for a config of any class."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def longrope():
    """A function that makes rope_parameters which change after 64 tokens, for that head size."""

    def make(head_dim):
        pairs = head_dim // 2
        return {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * pairs,
            "long_factor": [4.0] * pairs,
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        }

    return make


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
HYBRID = SMALL | {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def tiny_switch_interval():
    """Threads take turns every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def drafter_shape():
    """A function that makes a small DrafterConfig, with changes by field name."""
    from dflash.drafter_config import DrafterConfig

    def make(**changes):
        shape = DrafterConfig(
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=32,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            max_positions=128,
            block_size=4,
            mask_token_id=31,
            target_layer_ids=(1, 3),
            num_target_layers=6,
            sliding_window=0,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=None,
        )
        return dataclasses.replace(shape, **changes)

    return make


@pytest.fixture
def train_config(tmp_path, tiny_target_dir):
    """A function that makes a small TrainConfig on the CPU: `train_config(data={"seed": 1})`."""
    from dflash.config import TrainConfig

    def make(**sections):
        nested = {
            "model": {"target-model": str(tiny_target_dir), "num-draft-layers": 2, "block-size": 4},
            "data": {"data-dir": str(tmp_path / "data"), "max-seq-len": 64, "token-budget": 256},
            "devices": {"target-gpus": "cpu", "drafter-gpus": "cpu"},
            "run": {"output-dir": str(tmp_path / "out")},
        }
        for section, options in sections.items():
            nested.setdefault(section, {}).update(options)
        return TrainConfig.from_dict(nested)

    return make


@pytest.fixture
def make_batch():
    """A function that makes a micro-batch of documents of given lengths, drawn anew each time."""
    import torch

    from dflash.batches import Batch

    random = torch.Generator().manual_seed(0)

    def make(lengths, *, block_size=4, vocab_size=32, anchors=16):
        rows = [
            (torch.randint(vocab_size - 1, (n,), generator=random), torch.ones(n).bool())
            for n in lengths
        ]
        return Batch.drawn(
            0,
            0,
            rows,
            block_size=block_size,
            mask_token_id=vocab_size - 1,
            gamma=4.0,
            per_document=anchors,
            in_all=10**6,
            generator=random,
        )

    return make
