"""CUDA's lazy loading of kernels, which waits for running ones: harmless once all were loaded."""

import json
import os
import subprocess
import sys

import pytest

# One kernel spins until a flag is set, or gives up; on another stream a kernel runs, perhaps for
# the first time, and then sets the flag.
PROGRAM = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def spin(flag, turns, limit):
    turn = 0
    seen = tl.atomic_add(flag, 0)
    while (seen == 0) & (turn < limit):
        seen = tl.atomic_add(flag, 0)
        turn += 1
    tl.store(turns, turn)

limit = 4_000_000
flag, turns = torch.zeros(2, dtype=torch.int32, device="cuda").unbind()
x = torch.ones(8, device="cuda")
flag.fill_(1)
spin[(1,)](flag, turns, limit)
if sys.argv[1] == "loaded":
    torch.special.bessel_j0(x)
flag.fill_(0)
torch.cuda.synchronize()
one, other = torch.cuda.Stream(), torch.cuda.Stream()
with torch.cuda.stream(one):
    spin[(1,)](flag, turns, limit)
with torch.cuda.stream(other):
    torch.special.bessel_j0(x)
    flag.fill_(1)
torch.cuda.synchronize()
print(json.dumps({"gave_up": turns.item() == limit}))
"""


@pytest.fixture
def gave_up(tmp_path):
    """Whether the spinning kernel gave up, with the other kernel loaded before or not."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(loading, first):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), first],
            env={**os.environ, "CUDA_MODULE_LOADING": loading},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])["gave_up"]

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_a_kernel_that_was_loaded_before_waits_for_nobody(gave_up, loading):
    assert not gave_up(loading, "loaded")


@pytest.mark.gpu
def test_a_kernels_first_launch_waits_for_running_kernels_where_loading_is_lazy(gave_up):
    """Two kernels that wait for each other would stand still for ever: see docs/design.md."""
    assert gave_up("LAZY", "cold")
