"""Measurements in processes of their own: one line of JSON each, and an error is a result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def measured(
    script: str, *arguments: str, timeout_s: float, path: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """What the script beside this one prints last, as JSON; or {"error": why there is nothing}.

    Args:
        path: directories to import from before the installed packages.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    places = os.pathsep.join(str(place) for place in (ROOT, *path))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": places},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"error": said[-1], "stderr": done.stderr[-6000:]}
