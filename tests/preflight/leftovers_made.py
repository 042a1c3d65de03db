"""Children that leave, on purpose, what an earlier run can leave; each says when it is ready."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

HOLD = """
import mmap, sys
file = open(sys.argv[1], "r+b")
if sys.argv[2] == "mapped":
    held = mmap.mmap(file.fileno(), 1)
    file.close()
"""
# The main thread ends, as pthread_exit lets it; the other one lives on.
ZOMBIE = """
import ctypes, os, sys, threading
held = open(sys.argv[1], "r+b")
main = os.getpid()
def live():
    while open(f"/proc/{main}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print(main, flush=True)
    sys.stdin.buffer.raw.read(1)
    os._exit(0)
threading.Thread(target=live).start()
ctypes.CDLL(None).pthread_exit(None)
"""
# A grandchild that outlives its parent, which has said who it is.
ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import os, sys\\nwhile os.getppid() == int(sys.argv[1]): pass\\n"
    "print(os.getpid(), flush=True)\\nsys.stdin.read(1)", str(os.getpid()), *sys.argv[1:]])
os._exit(0)
"""
DELETED = """
import os, sys
log = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
ready = os.dup(1)
os.dup2(log, 1)
os.unlink(sys.argv[1])
os.write(ready, b"ready\\n")
sys.stdin.read(1)
"""
SEGMENT = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
os.close(file)
"""
READY = "\nprint('ready', flush=True)\nsys.stdin.read(1)"


@contextmanager
def child(code, *words, **options):
    """Runs Python code; yields the process and what it has said. It is ended afterwards."""
    command = [sys.executable, "-c", code, *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        said = process.stdout.readline().strip()
        try:
            yield process, said
        finally:
            pid = int(said) if said.isdigit() else process.pid
            for each in {pid, process.pid}:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
