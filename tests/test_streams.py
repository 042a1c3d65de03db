"""Tensors that go from one CUDA stream to another: in time, and with their memory kept."""

import threading

import pytest
import torch

from dflash import batches
from dflash.batches import TargetFeatures
from dflash.streams import Ready, own_stream

CPU = torch.device("cpu")
SLEEP_CYCLES = 1_000_000_000  # about half a second
SIZE = (1024, 1024)

gpu = pytest.mark.gpu


def test_on_the_cpu_there_is_nothing_to_wait_for():
    with own_stream(CPU):
        ready = Ready.after(CPU)
    ready.wait(CPU)
    assert ready.event is None


def in_a_thread(act):
    """Run it in a thread with a stream of its own, to the end."""
    result = []

    def run():
        with own_stream(torch.device("cuda:0")):
            result.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return result[0]


def made_late(batch):
    """Features that hold NaN until half a second from now."""
    features_TF = torch.full(SIZE, torch.nan, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    features_TF.fill_(1.0)
    return TargetFeatures(batch, features_TF, None, Ready.after(features_TF.device))


@gpu
@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_what_another_one_makes(make_batch, monkeypatch, waits):
    if not waits:
        monkeypatch.setattr(Ready, "wait", lambda *_: None)
    batch = make_batch([5])
    features = in_a_thread(lambda: made_late(batch))
    received_TF = in_a_thread(lambda: features.received(torch.device("cuda:0")).features_TF.clone())
    torch.cuda.synchronize()
    assert received_TF.isfinite().all() == waits


@gpu
@pytest.mark.parametrize("keeps", [True, False])
def test_memory_is_not_reused_while_another_stream_reads_it(make_batch, monkeypatch, keeps):
    if not keeps:
        monkeypatch.setattr(batches, "keep_for_this_stream", lambda _tensors: None)
    device = torch.device("cuda:0")
    batch = make_batch([5])
    maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(maker):
        features_TF = torch.ones(SIZE, device=device)
        features = TargetFeatures(batch, features_TF, None, Ready.after(device))
    with torch.cuda.stream(reader):
        received = features.received(device)
        torch.cuda._sleep(SLEEP_CYCLES)
        read_TF = received.features_TF * 1.0
    del features_TF, features, received
    with torch.cuda.stream(maker):
        torch.full(SIZE, 2.0, device=device)
    torch.cuda.synchronize()
    assert (read_TF == 1.0).all() == keeps


@gpu
def test_each_thread_has_a_stream_of_its_own():
    def current():
        return torch.cuda.current_stream()

    mine, other = in_a_thread(current), in_a_thread(current)
    assert len({mine.cuda_stream, other.cuda_stream, torch.cuda.current_stream().cuda_stream}) == 3
