"""The benchmarks in ci/: each runs, tiny, on the CPU, and its arithmetic is right.

DFLASH_PEERS_DIR names a directory with the packages that `bench_peers.py --peers` wants.
"""

import fcntl
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest

from dflash.data.completions import Completion, write_completions
from dflash.target import Target
from tests.test_sinks import step

ROOT = Path(__file__).parents[1]
CI = ROOT / "ci"
PEERS = os.environ.get("DFLASH_PEERS_DIR")
SCRIPTS = sorted(
    path.name for path in CI.glob("*.py") if "ArgumentParser" in path.read_text(encoding="utf-8")
)


def run(script, *arguments, path=(ROOT,)):
    done = subprocess.run(
        [sys.executable, CI / script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a module of ci/; the next test imports it anew."""
    monkeypatch.syspath_prepend(CI)
    for path in CI.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield importlib.import_module
    for path in CI.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def printed(bench, monkeypatch, capsys):
    """A function that runs a benchmark in this process and returns what it prints, by lines."""

    def run_main(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        bench(name).main()
        return capsys.readouterr().out.splitlines()

    return run_main


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_torch(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    assert "usage:" in run(script, "--help", path=(tmp_path,))


def test_flops_are_those_of_a_count_by_hand(bench):
    shape = bench("shapes").QWEN3_8B
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    slot = 6 * 5 * layer + 4 * 4096 * 151936 + 3.5 * 5 * 4 * 1536 * 4096
    token = 4 * 5 * 4096 * 4096 + 6 * 5 * 2 * 4096 * 1024
    assert shape.flops == pytest.approx(512 * 16 * slot + 3072 * token)
    assert shape.with_(documents=4).flops == pytest.approx(4 * shape.flops)


@pytest.mark.parametrize(("hidden", "heads"), [(128, (2, 1)), (1024, (16, 8)), (4096, (64, 8))])
def test_a_key_head_serves_whole_query_heads_in_the_start_table(bench, hidden, heads):
    shape = bench("bench_start").sized(Namespace(hidden=hidden, layers=2))
    assert (shape.heads, shape.kv_heads) == heads


def test_the_fit_recovers_what_made_the_seconds(bench):
    growth = bench("bench_growth")
    shapes = [bench("shapes").QWEN3_8B.with_(**changes) for changes in growth.GROWN]
    made = np.array([0.01, 2e-6, 1e-5, 3e-10])
    seconds = np.array(
        [made @ [1, s.context_tokens, s.slots, s.slots * s.tokens / 2] for s in shapes]
    )
    coefficients, residuals = growth.fitted(shapes, seconds)
    np.testing.assert_allclose(coefficients, made, rtol=1e-6)
    assert np.abs(residuals).max() < 1e-9
    assert np.abs(growth.fitted(shapes, seconds**2)[1]).max() > 0.01  # another law does not fit


def test_peers_side_by_side_with_ours():
    """Without the peers their rows say what is missing, and ours is measured."""
    lines = run(
        "bench_peers.py", "--tiny", "--device", "cpu", "--steps", "1", "--contenders",
        "ours,specforge",
    ).splitlines()  # fmt: skip
    ours = next(line for line in lines if line.startswith("ours ")).split()
    assert float(ours[1]) > 0 and ours[-2:] == ["1.00", "1.00"]
    assert "specforge         could not be run: ModuleNotFoundError" in "\n".join(lines)


@pytest.mark.skipif(not PEERS, reason="DFLASH_PEERS_DIR names no directory with the peers")
def test_the_peers_themselves():
    out = run(
        "bench_peers.py", "--tiny", "--device", "cpu", "--steps", "1", "--peers", PEERS,
        "--contenders", "ours,specforge,speculators,speculators-adamw",
    )  # fmt: skip
    assert "could not be run" not in out
    assert "not installed, never called: " in out


def test_who_measures_is_alone(bench, monkeypatch, tmp_path):
    """And has its whole limit for it: what it waited for its turn is not counted."""
    (tmp_path / "turns").touch()
    monkeypatch.setenv("DFLASH_BENCH_TURNS", str(tmp_path / "turns"))
    monkeypatch.setenv("DFLASH_BENCH_LIMIT_S", "7")
    lock, watched = fcntl.flock, Mock()
    watched.lock.side_effect = lock
    monkeypatch.setattr("fcntl.flock", watched.lock)
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", watched.stop)
    monkeypatch.setattr("faulthandler.dump_traceback_later", watched.start)
    taking_turns = bench("taking_turns")
    with (tmp_path / "turns").open() as neighbour:
        with taking_turns.alone(), pytest.raises(BlockingIOError):
            lock(neighbour, fcntl.LOCK_SH | fcntl.LOCK_NB)
        lock(neighbour, fcntl.LOCK_SH | fcntl.LOCK_NB)
    shared, own = (
        [call.stop(), call.lock(taking_turns.turns, how), call.start(7.0, exit=True)]
        for how in (fcntl.LOCK_SH, fcntl.LOCK_EX)
    )
    assert watched.mock_calls == shared + own + shared


def test_a_row_past_its_limit_says_where_it_was(bench):
    row = bench("children").step_of(
        "ours", bench("shapes").TINY, device="cpu", steps=1, timeout_s=0.01
    )
    assert row["error"].startswith('not done after 0.01 s, in File "')
    assert "Timeout (" in row["stderr"]


@pytest.mark.parametrize(
    "stderr, error",
    [
        ("", "exit status 1"),
        ("loading\nno such device\n", "no such device"),
        (
            "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 1\n\nThen\n\n"
            "Traceback (most recent call last):\n  File 'b', line 2\n    f(x)\n"
            "AssertionError: already tracked\n\nfrom user code:\n  File 'c'\n\nSet VERBOSE=1\n",
            "AssertionError: already tracked",
        ),
        ("Traceback (most recent call last):\n  File 'a'\nMemoryError: " + 999 * "x", None),
    ],
)
def test_a_row_tells_the_error_and_not_the_advice_below_it(bench, stderr, error):
    why = bench("children").why(subprocess.CompletedProcess([], 1, "", stderr), 9)
    assert why == (error or "MemoryError: " + 287 * "x")


def test_a_row_is_relative_to_ours(bench):
    peers, shape = bench("bench_peers"), bench("shapes").TINY
    row = {"ms": 30.0, "peak_gb": 1.0, "first_s": 2.0}
    text = peers.as_text("peer", shape, row, {"ms": 20.0, "peak_gb": 4.0}, ceiling=1.0)
    assert text.split()[-2:] == ["1.50", "0.25"]
    assert peers.as_text("peer", shape, row, {}, ceiling=1.0).split()[-2:] == ["-", "-"]


def test_only_known_packages_are_stood_in_for(bench):
    absent = bench("absent").stand_in()
    try:
        yunchang = importlib.import_module("yunchang.kernels")
        assert isinstance(yunchang.AttnType, type)
        assert not hasattr(yunchang, "__wrapped__")
        assert absent.used == {"yunchang"}
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package")
    finally:
        sys.meta_path.remove(absent)
        for name in ("yunchang", "yunchang.kernels"):
            sys.modules.pop(name, None)


def test_loss_alone(printed):
    lines = printed("bench_loss", "--tiny", "--device", "cpu", "--repeats", "1")
    assert [line[:20].strip() for line in lines[2:]] == [
        "CE",
        "CE + CAP",
        "CE + KL",
        "CE + KL + CAP",
    ]
    assert all(float(line.split()[-1]) > 0 for line in lines[2:])


def test_mask_alone(printed):
    (line,) = printed("bench_mask", "--tiny", "--device", "cpu", "--repeats", "1")
    assert line.startswith("96 context tokens, 32 draft slots in 1 chunk(s): mask ")
    assert 0 < float(line.split()[-1].rstrip("%")) < 100


def test_growth(printed):
    lines = printed("bench_growth", "--tiny", "--device", "cpu", "--steps", "1", "--at-once", "2")
    assert len(lines) == 1 + 5 + 2
    assert lines[-2].startswith("fit: ") and lines[-1].startswith("residual: ")


def test_the_pipeline_against_its_stages_by_turns(printed):
    lines = printed("bench_gpus", "--tiny", "--device", "cpu", "--steps", "4")
    turns, pipeline = (line.split() for line in lines[-2:])
    assert turns[:2] == ["by", "turns"] and turns[3] == "1.00"
    assert pipeline[:2] == ["cpu", "cpu"] and "drafter" in pipeline
    assert 0 < int(turns[turns.index("operations") - 3].rstrip("%")) < 100


@pytest.mark.gpu
@pytest.mark.parametrize(
    "command",
    [
        "bench_peers.py --tiny --steps 1 --contenders ours,ours-whole,ours-soft --at-once 2",
        "bench_loss.py --tiny --repeats 1",
        "bench_mask.py --tiny --repeats 1",
        "bench_gpus.py --tiny --steps 4",
        "bench_start.py --drafters 1 --layers 1 --hidden 128",
    ],
)
def test_on_a_gpu_nothing_fails(command):
    assert "could not be run" not in run(*command.split())


@pytest.mark.parametrize(
    ("targets", "drafters", "most"),
    [("0", "0", 1.0), ("0", "1", 1 / 0.6), ("0", "0,1", 1 / 0.8), ("0,1", "0,1", 2.0)],
)
def test_the_busiest_gpu_says_how_fast_a_layout_can_be(bench, targets, drafters, most):
    assert bench("runs").Devices(targets, drafters).most(0.6) == pytest.approx(most)


def test_the_targets_operations_are_those_of_a_count_by_hand(bench, tiny_model):
    target = Target(tiny_model, (1, 3))
    # 8 heads and 4 key heads of 16, hidden size 128, intermediate 320; layers 0 to 3 run.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 320
    assert bench("runs").target_flops(target, 10, 6) == 10 * 4 * (2 * layer + 4 * 3 * 128)


def test_prompts_to_learn_from_and_to_measure_on(bench, printed, monkeypatch, tmp_path):
    library, output = tmp_path / "library", tmp_path / "prompts"
    library.mkdir()
    doc = "What it does, in more than thirty characters."
    functions = [f'def f{i}(a, *, b=1):\n    """{doc}"""\n    return a\n' for i in range(60)]
    (library / "module.py").write_text("\n".join(functions))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(library))
    monkeypatch.setattr(bench("prompt_topics"), "TASKS", ("Explain {}.",))
    printed("prompt_files", str(output))
    learned, held_out = (
        [json.loads(line)["prompt"] for line in (output / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert len(held_out) >= 5 and not set(learned) & set(held_out)
    start = "Complete this Python function. Give the code only.\n\n```python\ndef f"
    code = [prompt for prompt in learned if prompt.startswith(start)]
    assert all(prompt.endswith(f'(a, *, b=1):\n    """{doc}"""\n```') for prompt in code)
    # All that is asked about a function is on one side.
    assert len(code) == sum("`module.f" in prompt for prompt in learned) > 50
    assert "Explain chess." in learned + held_out
    assert printed("prompt_files", str(output), "--limit", "50")[0] == "train: 50 prompts"


def as_words(options: dict[str, object]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]


def test_a_real_drafter(printed, tmp_path, tiny_target_dir):
    """Prompts to tau; the picture needs matplotlib, which may be missing."""
    prompts, work = tmp_path / "prompts", tmp_path / "work"
    prompts.mkdir()
    verbs = ("open", "read", "send", "write")
    lines = [json.dumps({"prompt": f"def {verb}_file(self):"}) + "\n" for verb in verbs]
    for name in ("train", "heldout", "set"):
        (prompts / f"{name}.jsonl").write_text("".join(lines))
    for name in ("train", "heldout"):  # what the target has answered is not asked again
        answers = [Completion(str(i), "", list(range(5, 29)), [0] * 8 + [1] * 16) for i in range(4)]
        write_completions(work / name, answers, {})
    options = {
        "--target": tiny_target_dir,
        "--prompts": prompts,
        "--work": work,
        "--train-s": 1e-3,  # one epoch
        "--device": "cpu",
        "--layers": 1,
        "--block-size": 4,
        "--max-new-tokens": 16,
        "--token-budget": 256,
        "--max-seq-len": 128,
        "--decoded": 1,
    }
    out = printed("real_drafter", *as_words(options))
    row = next(line for line in out if line.startswith("base  ")).split()
    assert row[1:3] == ["1", "1"] and min(map(float, row[3:])) >= 1
    (decoded,) = (line for line in out if "decoded: tau" in line)
    assert decoded.startswith("base, set, 1 prompts") and "0 wrong" in decoded
    assert (work / "curves.svg").exists() or any("matplotlib is not" in line for line in out)
    (work / "base.json").unlink()  # as after Ctrl-C: what was trained is not trained again
    trained = (work / "runs" / "base" / "metrics.jsonl").read_bytes()
    del options["--train-s"]
    again = printed("real_drafter", *as_words(options | {"--epochs": 1, "--decoded": 0}))
    assert next(line for line in again if line.startswith("base  ")).split() == row
    assert (work / "runs" / "base" / "metrics.jsonl").read_bytes() == trained


def test_curves_are_those_of_the_metrics(bench, tmp_path):
    rows = [
        step(i, ce=4.0 / i, evaluation={"tau": 1.5} if i == 2 else {}).to_dict() for i in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = bench("curves").read(tmp_path)
    assert (curves.steps, curves.ce) == ([1, 2, 3], [4.0, 2.0, 4.0 / 3])
    assert (curves.evaluated, curves.tau) == ([2], [1.5])
