"""Threads that wait for kernels that do not end, each on a GPU of its own.

An argument for each: `synchronize`, `event` or `item`.
"""

import sys
import threading
import time

import torch

CYCLES = 200_000_000_000  # more than a minute


def wait(how, device, barrier):
    torch.cuda.set_device(device)
    x = torch.ones(1, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    event = torch.cuda.Event()
    event.record()
    if barrier.wait() == 0:
        print("stuck", flush=True)
    if how == "synchronize":
        torch.cuda.synchronize()
    elif how == "event":
        event.synchronize()
    else:
        x.item()


ways = sys.argv[1:]
all_there = threading.Barrier(len(ways))
for i, how in enumerate(ways):
    thread = threading.Thread(target=wait, name=f"drafter-{i}", args=(how, i, all_there))
    thread.daemon = True
    thread.start()
time.sleep(120)
