"""One thread stays in a compile, another waits for the compile lock, which `stuck` announces."""

import threading
import time

import torch

inside, never = threading.Event(), threading.Event()


def backend(graph, _inputs):
    inside.set()
    never.wait()
    return graph.forward


first = torch.compile(lambda x: x + 1, backend=backend)
second = torch.compile(lambda x: x * 2, backend="eager")
x = torch.ones(2)
threading.Thread(target=lambda: first(x), name="drafter-0", daemon=True).start()
inside.wait()
threading.Thread(target=lambda: second(x), name="drafter-1", daemon=True).start()
print("stuck", flush=True)
time.sleep(120)
