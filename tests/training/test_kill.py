"""kill -9 at every file-system call of a save, and at random moments of a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from dflash.config import TrainConfig
from dflash.trainer import train

HERE = Path(__file__).parent
KILLS = int(os.environ.get("DFLASH_KILLS", "5"))


def run_script(name, *arguments):
    return subprocess.run(
        [sys.executable, str(HERE / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150 + 10 * KILLS,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
    )


def test_a_save_killed_or_refused_at_any_call_leaves_whole_checkpoints(tmp_path):
    done = run_script("kill_points.py", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert {"fsync", "mkdir", "rename", "save_file", "unlink"} <= set(counts["calls"])
    assert counts["killed"] == counts["refused"] >= 30
    assert (counts["torn"], counts["too_large"]) == (2, 4)


def test_the_control_a_save_into_its_final_place_is_found_out(tmp_path):
    done = run_script("kill_points.py", tmp_path / "run", "naive")
    assert done.returncode == 1
    assert re.search("not a complete checkpoint|cannot be read|holds neither", done.stderr)


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(options, tmp_path):
    """DFLASH_KILLS=50 for the full count."""
    options["run"]["save-interval"] = 2
    options["optimizer"]["epochs"] = KILLS + 1  # 6 steps each, of which a kill sees at most 5
    config = TrainConfig.from_dict(options)
    assert train(config) == 0
    config.save_toml(tmp_path / "undisturbed.toml")
    done = run_script("kill_run.py", tmp_path / "undisturbed.toml", KILLS, 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert (found["kills"], found["same"]) == (KILLS, True)
