"""What a new run needs: there, and missing in every way; asked in a child that has torch."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from diagnostics.preflight import inquiry
from diagnostics.preflight import run as needs
from diagnostics.preflight.line import Seen
from diagnostics.processes import Table
from diagnostics.verdict import Status
from tests.preflight.leftovers_made import READY, child

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts take root")
HARMLESS = "import sys" + READY
NAMES = ["target", "data", "start", "disk space"]


@pytest.fixture
def saved(train_config, tmp_path):
    """A function that writes the run's run.toml, and its data if there are none yet."""
    from dflash.data.completions import Completion, write_completions

    def save(**sections):
        path = tmp_path / "run.toml"
        train_config(**sections).save_toml(path)
        if not (tmp_path / "data").exists():
            rows = [Completion(str(n), "test", [n] * 20, [0] * 5 + [1] * 15) for n in range(1, 4)]
            write_completions(tmp_path / "data", rows, {})
        return path

    return save


def asked(path):
    """Lines by name, and what was said on the way."""
    seen = Seen(Table((), 0.0), needs.open_run(path))
    told = []
    lines = needs.inquire(path, seen, told.append)
    assert [line.name for line in lines] == NAMES
    return {line.name: line for line in lines}, told


def test_a_run_that_has_what_it_needs_and_what_its_checkpoint_takes(
    saved, train_config, tmp_path, monkeypatch
):
    import torch

    from dflash.checkpoint import Checkpoints, Progress
    from dflash.drafter import build_drafter
    from dflash.optim import make_optimizer
    from dflash.resolve import drafter_shape

    answers = []
    monkeypatch.setattr(
        needs, "ask", lambda *given: answers.append(inquiry.ask(*given)) or answers[0]
    )
    lines, told = asked(saved())
    assert {line.status for line in lines.values()} == {Status.OK}, lines
    assert told == ["target", "data", "resume", "space"]
    assert "3 rows; the first has 20 tokens, the last 20" in lines["data"].said
    config = train_config()
    drafter = build_drafter(drafter_shape(config), seed=0, device=torch.device("cpu"))
    optimizer = make_optimizer(drafter, config.optimizer)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    step = Checkpoints(tmp_path / "out", 0, {}).save(drafter, optimizer, Progress(1, 1))
    real = sum(file.stat().st_size for file in step.iterdir())
    expected = answers[0]["space"]["bytes"]
    assert expected <= real <= 1.01 * expected + (1 << 15)


def test_linear_attention_without_its_kernels(saved, hybrid_model, tiny_target_dir, tmp_path):
    from dflash.resolve import missing_kernels

    target = tmp_path / "target"
    hybrid_model.config.save_pretrained(target)
    for file in tiny_target_dir.glob("tokenizer*"):
        shutil.copy(file, target)
    model = {"target-model": str(target), "mask-token-id": 5, "target-layer-ids": "1,2"}
    lines, _ = asked(saved(model=model, devices={"target-gpus": "0", "drafter-gpus": "0"}))
    missing = missing_kernels(hybrid_model.config, ["cuda:0"])
    expected = (Status.PROBLEM, f"pip install {' '.join(missing)}") if missing else (Status.OK, "")
    assert (lines["target"].status, lines["target"].remedy) == expected
    assert missing_kernels(hybrid_model.config, ["cpu"]) == []


def test_a_target_without_tokenizer_and_data_cut_short(saved, tiny_target_dir, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    for file in target.glob("tokenizer*"):
        file.unlink()
    path = saved(model={"target-model": str(target)})
    (arrow,) = (tmp_path / "data").glob("*.arrow")
    os.truncate(arrow, arrow.stat().st_size // 2)
    lines, _ = asked(path)
    assert [lines[name].status.value for name in NAMES] == ["problem", "problem", "ok", "unknown"]
    assert "the tokenizer has 1 tokens, the model 2048" in lines["target"].said
    assert "cannot read as Arrow" in lines["data"].said


@needs_root
def test_a_disk_without_room_for_the_checkpoints(saved, train_config, tmp_path):
    """The file system of the output directory, not of this test."""
    path, out = saved(), tmp_path / "out"
    out.mkdir()
    seen = Seen(Table((), 0.0), needs.open_run(path))
    answer = {"bytes": 3 << 20, "saves": 9, "kept": 9}
    assert needs._space(answer, seen.run).status is Status.OK
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", out], check=True)
    try:
        line = needs._space(answer, seen.run)
    finally:
        subprocess.run(["umount", out], check=True)
    assert line.status is Status.PROBLEM
    assert line.remedy.startswith("Type --keep-checkpoints 4;")
    assert "9 checkpoint(s) of 3.0 MiB and one being written: 30.0 MiB of 16.0 MiB" in line.said


def test_without_torch_it_is_unknown_and_says_what_to_install(saved, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines, _ = asked(saved())
    assert {line.status for line in lines.values()} == {Status.UNKNOWN}
    assert "dflash-diag[train]" in lines["target"].said


def test_a_child_that_hangs_is_ended(saved, monkeypatch):
    monkeypatch.setattr(inquiry, "CHILD", "import signal; signal.pause()")
    monkeypatch.setattr(inquiry, "LIMIT_S", 0.3)
    lines, _ = asked(saved())
    assert {line.status for line in lines.values()} == {Status.UNKNOWN}
    assert "signal 9" in lines["target"].said


def test_an_output_directory_that_nobody_uses(seen, run):
    assert needs.output_directory(seen(run=run())).status is Status.OK


def test_who_reads_the_log_there_is_no_run(seen, run, tmp_path):
    (tmp_path / "out").mkdir()
    log = tmp_path / "out" / "train.log"
    log.write_text("ready\n")
    command = ["tail", "-f", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "ready\n"
        line = needs.output_directory(seen(reader.pid, run=run()))
        reader.kill()
    assert line.status is Status.OK


@pytest.mark.parametrize("place", ["/proc/out", "/dev/null"])
def test_an_output_directory_that_cannot_be(seen, run, place):
    made = replace(run(), directory=Path(place))
    assert needs.output_directory(seen(run=made)).status is Status.PROBLEM


@pytest.mark.parametrize("sign", ["option", "config", "open file", "heartbeat"])
def test_a_run_that_still_runs_in_the_output_directory(seen, run, tmp_path, sign):
    (tmp_path / "out").mkdir()
    log = tmp_path / "out" / "train.log"
    code, words = HARMLESS, {"option": ["--output-dir=out"], "config": ["out/run.toml"]}
    if sign == "open file":
        code = f"log = open({str(log)!r}, 'w')\n{HARMLESS}"
    if sign == "heartbeat":
        code = (
            "from pathlib import Path\nfrom dflash.heartbeat import Heartbeat\nimport os\n"
            "os.chdir('/')\n"
            f"Heartbeat(Path({str(log.with_name('heartbeat'))!r}), ['a'], "
            f"start_limit_s=1.0, limit_s=1.0)\n{HARMLESS}"
        )
    with child(code, *words.get(sign, []), cwd=tmp_path) as (process, _):
        pid = process.pid if sign == "heartbeat" else None
        line = needs.output_directory(seen(process.pid, run=run(pid)))
    assert line.status is Status.PROBLEM
    assert [culprit.whose for culprit in line.culprits] == ["this run's"]


def test_the_heartbeat_names_the_process_only_while_it_lives(saved, tmp_path):
    from dflash.heartbeat import Heartbeat

    path = saved()
    (tmp_path / "out").mkdir()
    assert needs.open_run(path).pid is None
    Heartbeat(tmp_path / "out" / "heartbeat", ["a"], start_limit_s=1.0, limit_s=1.0)
    assert needs.open_run(path).pid == os.getpid()
