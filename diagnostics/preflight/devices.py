"""The GPUs, and the settings that decide how memory and kernels get onto them."""

import re

from diagnostics import gpus
from diagnostics.preflight.line import Line, Seen, ok, problem, unknown

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
OPTION = re.compile(r"\s*\w+\s*:\s*(\[[^\[\]]*\]|[\w.>-]+)\s*")
LOADING = {"LAZY", "EAGER", "DEFAULT"}
OFF = {"", "0"}
# Variables of a debugging session that change what runs, and what each does.
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the GPU",
    "TORCHDYNAMO_DISABLE": "torch.compile compiles nothing",
    "TORCH_COMPILE_DISABLE": "torch.compile compiles nothing",
}


def gpu_memory(seen: Seen) -> Line:
    """Memory in use and work on a GPU, and whether a process answers for it."""
    name = "GPU memory"
    found = seen.gpus
    if found is None:
        return unknown(name, "there are NVIDIA GPUs, but neither NVML nor nvidia-smi answers")
    if not found:
        return _without_gpu(seen, name)
    busy = [gpu for gpu in found if gpu.is_busy]
    shown = [str(gpu) for gpu in busy or found]
    if busy:
        return _busy(seen, name, busy, shown)
    files = gpus.device_files()
    if not all(gpu.is_told for gpu in found) or len(files) > len(found):
        return unknown(name, "the driver does not tell of every GPU", *shown)
    return ok(name, f"{len(found)} GPU(s), nearly empty and idle", *shown)


def _busy(seen: Seen, name: str, busy: list[gpus.Gpu], shown: list[str]) -> Line:
    numbers = ", ".join(str(gpu.index) for gpu in busy)
    told = sorted({pid for gpu in busy for pid in gpu.pids})
    if told:
        shown.append(f"NVML names process(es) {', '.join(map(str, told))}")
    free = "End whoever holds it, see GPU holders, or take other GPUs: CUDA_VISIBLE_DEVICES=..."
    if seen.table.holders(seen.gpu):
        return problem(name, f"GPU {numbers} is in use", *shown, remedy=free)
    if told or seen.table.gap:
        said = f"GPU {numbers} is in use by a process that cannot be seen here"
        return problem(name, said, *shown, remedy="Look outside of this container, or as root.")
    said = f"GPU {numbers} is busy, and no process holds it: another container, or a driver's ghost"
    remedy = "Look outside of this container; nvidia-smi -r resets a GPU that nobody uses."
    return problem(name, said, *shown, remedy=remedy)


def _without_gpu(seen: Seen, name: str) -> Line:
    wanted = seen.run is not None and not seen.run.config.devices.all_cpu
    if wanted:
        remedy = "Start the container with its GPUs, or take --target-gpus cpu --drafter-gpus cpu."
        return problem(name, "the run wants GPUs, and there is no NVIDIA driver", remedy=remedy)
    return ok(name, "no NVIDIA driver and no GPU here")


def device_numbers(seen: Seen) -> Line | None:
    """Whether every GPU that the run names is there, as CUDA_VISIBLE_DEVICES leaves them."""
    name = "GPU numbers"
    if seen.run is None or seen.run.config.devices.all_cpu:
        return None
    devices = seen.run.config.devices
    named = sorted({*devices.target_gpus, *devices.drafter_gpus} - {"cpu"})
    visible = seen.environ.get("CUDA_VISIBLE_DEVICES")
    found = seen.gpus
    if found is None and visible is None:
        return unknown(name, "the driver does not say how many GPUs there are")
    count = len(found or ())
    if visible is not None:
        count = len([part for part in visible.split(",") if part.strip()])
    missing = [each for each in named if int(each.partition(":")[2] or 0) >= count]
    how = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if missing:
        said = f"the run names {', '.join(missing)}, and there are {count} GPUs{how}"
        return problem(name, said, remedy="Change --target-gpus and --drafter-gpus.")
    return ok(name, f"{', '.join(named)}: of {count} GPUs{how}")


def settings(seen: Seen) -> Line:
    """What the variables of this shell do to memory and kernels.

    Lazy loading is fine for dflash train, whose warm-up launches every kernel once before two
    GPUs wait for each other (docs/design.md); a program without one may stand still.
    """
    name = "CUDA settings"
    environ = seen.environ
    if not environ:
        return unknown(name, "this process has no environment at all")
    wrong = [*_wrong_allocator(environ), *_wrong_loading(environ)]
    wrong += [
        f"{key}={environ[key]}: {what}"
        for key, what in SLOW.items()
        if environ.get(key, "") not in OFF
    ]
    names = (*ALLOCATOR, "CUDA_MODULE_LOADING")
    shown = [f"{key}={environ[key]}" for key in names if key in environ]
    loads = environ.get("CUDA_MODULE_LOADING", "LAZY").upper()
    told = f"kernels are loaded {'all at the start' if loads == 'EAGER' else 'at their first use'}"
    if wrong:
        return problem(
            name, f"{len(wrong)} setting(s) to change", *wrong, remedy="Set it right, or unset it."
        )
    return ok(name, ", ".join(shown) or "torch's and CUDA's defaults", told)


def _wrong_allocator(environ: dict[str, str]) -> list[str]:
    wrong = []
    for key in ALLOCATOR:
        value = environ.get(key, "")
        parts = re.split(r",(?![^\[]*\])", value) if value else []
        wrong += [
            f"{key}: {part.strip()!r} is not option:value, torch will refuse it"
            for part in parts
            if not OPTION.fullmatch(part)
        ]
    values = {environ[key] for key in ALLOCATOR if key in environ}
    if len(values) > 1:
        wrong.append(f"{' and '.join(key for key in ALLOCATOR if key in environ)} contradict")
    return wrong


def _wrong_loading(environ: dict[str, str]) -> list[str]:
    value = environ.get("CUDA_MODULE_LOADING")
    if value is None or value.upper() in LOADING:
        return []
    return [f"CUDA_MODULE_LOADING={value}: CUDA knows {', '.join(sorted(LOADING))}"]
