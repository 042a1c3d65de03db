"""A thread waits for a kernel that does not end: `synchronize`, `event` or `item`."""

import sys
import threading
import time

import torch

cycles = 200_000_000_000  # more than a minute
x = torch.ones(1, device="cuda")
torch.cuda.synchronize()


def wait():
    torch.cuda._sleep(cycles)
    event = torch.cuda.Event()
    event.record()
    print("stuck", flush=True)
    if sys.argv[1] == "synchronize":
        torch.cuda.synchronize()
    elif sys.argv[1] == "event":
        event.synchronize()
    else:
        x.item()


threading.Thread(target=wait, name="drafter-1", daemon=True).start()
time.sleep(120)
