"""What spoils a capture, and what dflash.cuda_graphs does about it."""

import subprocess
import sys
import threading

import pytest
import torch

from dflash.streams import own_stream

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
CHILD_LIMIT_S = 120


@pytest.mark.parametrize("private", [True, False])
def test_a_neighbour_may_draw_during_a_capture_only_with_its_own_generator(private):
    """The rule that dflash.randomness keeps: a capture owns the device's default generator."""
    random = torch.Generator("cuda").manual_seed(0) if private else None
    torch.rand(1, device="cuda")
    errors = []

    def draw():
        try:
            torch.rand(8, device="cuda", generator=random)
        except RuntimeError as error:
            errors.append(error)

    ones = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with own_stream(CUDA):
        graph.capture_begin(capture_error_mode="thread_local")
        neighbour = threading.Thread(target=draw)
        neighbour.start()
        neighbour.join(60)
        ones.mul_(2.0)
        graph.capture_end()
    assert (errors == []) == private


CAPTURE = """
import gc, sys, threading
from contextlib import nullcontext
import torch
from dflash.cuda_graphs import capturing
from dflash.streams import own_stream

def a_graph_that_only_a_collection_finds():
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    ones.mul_(2.0)
    graph.capture_end()
    cycle = [graph]
    cycle.append(cycle)

def collect():
    gc.set_threshold(1)
    return [[] for _ in range(10_000)]

def wait_for_the_device():
    def wait():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pass
    neighbour = threading.Thread(target=wait)
    neighbour.start()
    neighbour.join(60)

beside = {"collect": collect, "wait": wait_for_the_device, "nothing": lambda: None}[sys.argv[1]]
guard = {"capturing": capturing, "unguarded": nullcontext}[sys.argv[2]]
with own_stream(torch.device("cuda:0")):
    ones = torch.ones(8, device="cuda")
    gc.disable()
    a_graph_that_only_a_collection_finds()
    gc.enable()
    torch.cuda.current_stream().synchronize()
    with guard():
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            ones.mul_(2.0)
            beside()
            ones.mul_(2.0)
            graph.capture_end()
            print("captured")
        except RuntimeError:
            print("spoilt")
"""


@pytest.mark.parametrize(
    ("beside", "guard", "outcome"),
    [
        ("nothing", "unguarded", "captured"),
        ("collect", "capturing", "captured"),
        ("collect", "unguarded", "spoilt"),
        # No guard keeps other threads from it: therefore drafters capture once all have compiled.
        ("wait", "capturing", "spoilt"),
    ],
)
def test_garbage_and_whole_device_waits_spoil_a_capture(beside, guard, outcome):
    """In a process of its own: nothing works there any more after a spoilt capture."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE, beside, guard],
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
    )
    assert done.stdout.split() == [outcome], done.stderr
