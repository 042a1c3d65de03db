"""Everything about an environment that can change what a program computes or how fast.

Like diagnostics/deploy/fingerprint.py it is sent where it is needed: alone, through standard input,
under any Python 3.8 or newer. It prints one JSON object, section -> name -> value, the sections
that matter most for compiling and numerics first. torch is asked in a child process.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from typing import Any

LIMIT_S = 120
HIDDEN = "***"
SECRET = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")
VARIABLES = (
    *("CUDA", "CUDNN", "NCCL", "NVIDIA", "PYTORCH", "TORCH", "TRITON", "OMP", "MKL", "OPENBLAS"),
    *("KMP", "GOMP", "PYTHON", "HF_", "TRANSFORMERS", "TOKENIZERS", "XDG_CACHE", "TMPDIR"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC", "VIRTUAL_ENV", "LANG", "LC_ALL", "DFLASH"),
)
NUMERICS = (
    *("torch", "triton", "transformers", "flash-attn", "flash-linear-attention", "causal-conv1d"),
    *("xformers", "accelerate", "safetensors", "tokenizers", "numpy", "pyarrow", "dflash-diag"),
)
LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "STACK", "AS", "CORE")
ASK_TORCH = """
import json, sys
import torch
told = {"version": torch.__version__, "git": torch.version.git_version, "CUDA": torch.version.cuda}
told["built as"] = " ".join(torch.__config__.show().split())
told["cuDNN"] = torch.backends.cudnn.version()
told["threads"] = torch.get_num_threads()
told["float32 products"] = torch.get_float32_matmul_precision()
told["deterministic"] = torch.are_deterministic_algorithms_enabled()
if torch.cuda.is_available():
    told["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for i in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(i)
        told[f"GPU {i}"] = f"{it.name}, {it.major}.{it.minor}, {it.total_memory >> 20} MiB"
else:
    told["GPUs"] = "none seen"
import torch._inductor.config as inductor, torch._dynamo.config as dynamo
PLAIN = (bool, int, float, str, type(None))  # others are shown by their address, anew each time
for name, config in (("inductor", inductor), ("dynamo", dynamo)):
    try:
        plain = {k: v for k, v in config.get_config_copy().items() if isinstance(v, PLAIN)}
        told[name + " settings"] = json.dumps(plain, sort_keys=True)
    except Exception as error:
        told[name + " settings"] = f"unknown: {error}"
print(json.dumps(told, default=str))
"""


def collect() -> "dict[str, dict[str, Any]]":
    """All sections."""
    return {
        "torch": _torch(),
        "driver": _driver(),
        "packages for compiling and numerics": _packages(NUMERICS),
        "variables": _variables(),
        "python": {
            "version": sys.version.split()[0],
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "flags": str(sys.flags),
        },
        "system": _system(),
        "limits": {name: _limit(name) for name in LIMITS},
        "all packages": _packages(),
    }


def _limit(name: str) -> str:
    soft, hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))
    return f"{soft} of {hard}"


def _torch() -> "dict[str, Any]":
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"unknown": f"import torch took more than {LIMIT_S} s"}
    if done.returncode:
        return {"unknown": (done.stderr.strip().splitlines() or ["no reason given"])[-1]}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name in told:
        if name.endswith(" settings") and not told[name].startswith("unknown"):
            told[name] = hashlib.sha256(told[name].encode()).hexdigest()[:16]
    return told


def _driver() -> "dict[str, Any]":
    try:
        with open("/proc/driver/nvidia/version") as file:
            return {"NVIDIA": " ".join(file.readline().split())}
    except OSError:
        return {"NVIDIA": "no kernel module seen"}


def _packages(names: "Any" = None) -> "dict[str, Any]":
    """Versions, with a hash of the installed record: two builds of one version differ."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if names is None or name in names:
            record = distribution.read_text("RECORD") or ""
            digest = hashlib.sha256("\n".join(sorted(record.splitlines())).encode()).hexdigest()
            found[name] = f"{distribution.version} ({digest[:8] if record else 'no record'})"
    return {name: found[name] for name in sorted(found)}


def _variables() -> "dict[str, Any]":
    return {
        name: HIDDEN if any(word in name.upper() for word in SECRET) else os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(VARIABLES)
    }


def _system() -> "dict[str, Any]":
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "C library": " ".join(platform.libc_ver()),
        "system": _os_name(),
        "container": _container(),
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "processor": _from("/proc/cpuinfo", "model name"),
        "memory": _from("/proc/meminfo", "MemTotal"),
        "/dev/shm": _shared_memory(),
    }


def _shared_memory() -> str:
    if not os.path.isdir("/dev/shm"):
        return "not there"
    return f"{shutil.disk_usage('/dev/shm').total >> 20} MiB"


def _os_name() -> str:
    return _from("/etc/os-release", "PRETTY_NAME", "=").strip('"')


def _container() -> str:
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if os.path.exists(path):
            return name
    try:
        with open("/proc/1/environ", "rb") as file:
            for word in file.read().split(b"\0"):
                if word.startswith(b"container="):
                    return word.partition(b"=")[2].decode(errors="replace")
    except OSError:
        return "unknown: process 1 cannot be read"
    return "none seen"


def _from(path: str, field: str, separator: str = ":") -> str:
    try:
        with open(path, errors="replace") as file:
            for line in file:
                if line.startswith(field):
                    return line.partition(separator)[2].strip()
    except OSError:
        pass
    return "unknown"


if __name__ == "__main__":
    print(json.dumps(collect()))
