"""Hang in one of many ways: `hangs.py KIND`. Prints `stuck` as its last words. Python 3.8 on."""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

HANGS = {}


def hang(fn):
    HANGS[fn.__name__] = fn
    return fn


def run(*loops):
    """A thread for each (name, function), and a main thread that waits for them to end."""
    threads = [threading.Thread(target=fn, name=name, daemon=True) for name, fn in loops]
    for thread in threads:
        thread.start()
    print("stuck", flush=True)
    for thread in threads:
        thread.join()


@hang
def lock_pair():
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(mine, other):
        with mine:
            both.wait()
            with other:
                pass

    run(("a", lambda: take(first, second)), ("b", lambda: take(second, first)))


@hang
def barrier():
    parties = threading.Barrier(4)

    def dies():
        sys.exit()

    loops = [(f"warmup-{i}", parties.wait) for i in range(4)]
    loops[2] = ("warmup-2", dies)
    run(*loops)


@hang
def dead_producer():
    items = queue.Queue()
    run(("producer", lambda: None), ("consumer-0", items.get), ("consumer-1", items.get))


@hang
def dead_consumer():
    items = queue.Queue(1)
    items.put(0)
    run(("producer", lambda: items.put(1)), ("consumer", lambda: None))


@hang
def queue_join():
    items = queue.Queue()
    items.put(0)
    run(("closer", items.join))


@hang
def event():
    never = threading.Event()
    run(("waiter", never.wait))


@hang
def event_with_a_limit():
    never = threading.Event()
    run(("waiter", lambda: never.wait(1000)))


@hang
def joined_with_a_limit():
    items = queue.Queue()
    waiter = threading.Thread(target=items.get, name="waiter", daemon=True)
    waiter.start()
    print("stuck", flush=True)
    waiter.join(1000)


@hang
def lock_of_one_who_goes_on():
    lock, held = threading.Lock(), threading.Event()

    def hold():
        with lock:
            held.set()
            threading.Event().wait(1000)

    def want():
        held.wait()
        lock.acquire()

    run(("holder", hold), ("waiter", want))


@hang
def event_of_a_signal():
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    print("stuck", flush=True)
    asked.wait()


@hang
def lock_with_a_limit():
    lock = threading.Lock()
    lock.acquire()
    run(("waiter", lambda: lock.acquire(timeout=1000)))


@hang
def idle_pool():
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: together.wait(), range(2)))
        run(("waiter", threading.Event().wait))


@hang
def ended_main():
    parties = threading.Barrier(3)
    for i in range(2):
        threading.Thread(target=parties.wait, name=f"party-{i}").start()
    print("stuck", flush=True)


@hang
def condition():
    never = threading.Condition()

    def wait():
        with never:
            never.wait()

    run(("waiter", wait))


@hang
def semaphore():
    run(("waiter", threading.Semaphore(0).acquire))


@hang
def join_cycle():
    threads, ready = {}, threading.Event()

    def join(other):
        ready.wait()
        threads[other].join()

    for name, other in (("a", "b"), ("b", "a")):
        threads[name] = threading.Thread(target=join, args=(other,), name=name, daemon=True)
        threads[name].start()
    ready.set()
    print("stuck", flush=True)
    threads["a"].join()


@hang
def gil():
    def hold():
        print("stuck", flush=True)
        ctypes.PyDLL(None).sleep(100)  # PyDLL keeps the GIL during the call

    run(("holder", hold), ("other", lambda: time.sleep(0.1)))


@hang
def native_mutex():
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    held, never = threading.Event(), threading.Event()

    def hold():
        libc.pthread_mutex_lock(mutex)
        held.set()
        never.wait()

    def want():
        held.wait()
        libc.pthread_mutex_lock(mutex)

    run(("owner", hold), ("waiter", want))


@hang
def forked():
    lock, held = threading.Lock(), threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(100)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        print(f"pid {os.getpid()}", flush=True)
        lock.acquire()
    os.waitpid(child, 0)


@hang
def pipe_full():
    reader, writer = os.pipe()
    run(("writer", lambda: os.write(writer, b"x" * 1_000_000)), ("reader", lambda: reader))


@hang
def socket_read():
    left, right = socket.socketpair()
    run(("client", lambda: left.recv(1)), ("server", lambda: right))


@hang
def child():
    run(("parent", lambda: subprocess.call([sys.executable, "-c", "import time; time.sleep(100)"])))


@hang
def uninterruptible():
    """vfork's parent: its child blocks in opening a pipe that nobody writes to."""
    path = sys.argv[2]
    os.mkfifo(path)
    action = [(os.POSIX_SPAWN_OPEN, 9, path, os.O_RDONLY, 0)]
    print("stuck", flush=True)
    os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}, file_actions=action)


@hang
def stopped():
    print("stuck", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


@hang
def sleeping():
    run(("sleeper", lambda: time.sleep(100)))


@hang
def computing():
    def compute():
        total = 0
        while True:
            total += sum(range(1000))

    run(("worker", compute))


HANGS[sys.argv[1]]()
