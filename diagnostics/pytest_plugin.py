"""A pytest plugin: other projects put a probe of `dflash-diag` into their own tests.

    @pytest.mark.dflash_probe("fxrace", "--target", "trainer.steps:step")
    def test_our_step_compiles_in_threads(): ...

The probe runs before the test's body, in a process of its own. A finding fails the test, and so
does a probe that could not check, unless the marker says `unknown="skip"`. The fixture
`dflash_probe` gives the verdict instead.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

LIMIT_S = 600.0
Probe = Callable[..., dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, for --strict-markers."""
    config.addinivalue_line(
        "markers",
        'dflash_probe(*words, unknown="fail"): fail if `dflash-diag WORDS` finds something',
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run the probe of every marker of the test."""
    for marker in item.iter_markers("dflash_probe"):
        verdict = run(*marker.args)
        told = "\n".join(filter(None, [verdict["summary"], verdict["remedy"]]))
        if verdict["status"] == "problem":
            pytest.fail(f"{verdict['code']}: {told}", pytrace=False)
        if verdict["status"] == "unknown":
            skips = marker.kwargs.get("unknown") == "skip"
            (pytest.skip if skips else pytest.fail)(f"could not check: {told}")


@pytest.fixture
def dflash_probe() -> Probe:
    """A function that runs `dflash-diag WORDS --json` and returns the verdict as a dictionary."""
    return run


def run(*words: str) -> dict[str, Any]:
    """The verdict of a probe. Raises pytest.UsageError where the words are wrong."""
    command = [sys.executable, "-m", "diagnostics", *words, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {
            "status": "unknown",
            "code": "no-answer",
            "summary": f"{' '.join(words)}: no answer within {LIMIT_S:g} s",
            "remedy": "",
        }
    if done.returncode == 2 or not done.stdout.strip():
        raise pytest.UsageError(f"dflash-diag {' '.join(words)}: {done.stderr.strip()}")
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
