"""The machine: cores, compiled kernels, GPUs, memory, disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jobs.checkup.findings import Finding, gigabytes, guarded

AREA = "machine"
LEAST_MEMORY = 4 * 2**30
LEAST_DISK = 5 * 2**30
LEAST_SHARED = 128 * 2**20
"""Ray's object store of a job is 80 MiB, and other things live there too."""


def findings() -> Iterator[Finding]:
    yield from guarded(AREA, "CPU", "", _cores, "warn")
    yield from guarded(AREA, "kernels", "", _kernels, "warn")
    yield from guarded(AREA, "GPU", "install a build of torch for this driver", _gpus, "warn")
    yield from guarded(AREA, "memory", "", _memory, "warn")
    yield from guarded(AREA, "shared memory", "", _shared_memory, "warn")
    for name, folder in _folders():
        yield from guarded(AREA, f"disk, {name}", "", partial(_disk, name, folder), "warn")


def _cores() -> Iterator[Finding]:
    yield Finding(AREA, "CPU", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores for this process")


def _kernels() -> Iterator[Finding]:
    """Whether models on the CPU run through compiled kernels; they are built here if they are not yet."""
    from workers.native.build import NativeUnavailable, cpu_features, load_kernels

    wanted = ("avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16")
    features = ", ".join(name for name in wanted if name in cpu_features()) or "no AVX-512"
    import torch  # noqa: F401  its OpenMP runtime is the one that the kernels are bound to

    try:
        load_kernels()
    except NativeUnavailable as error:
        advice = "jobs on the CPU run without them, slower; install g++, on a CPU with AVX-512"
        yield Finding(AREA, "kernels", "warn", f"{error} ({features})", advice)
    else:
        yield Finding(AREA, "kernels", "ok", f"compiled and loaded ({features})")


def _gpus() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Finding(AREA, f"GPU {index}", "ok", f"{name}, {gigabytes(free)} of {gigabytes(total)} free")
    elif shutil.which("nvidia-smi"):
        found = f"nvidia-smi is there, but torch {torch.__version__} sees no device"
        yield Finding(AREA, "GPU", "warn", found, "install a build of torch for this driver")
    else:
        yield Finding(AREA, "GPU", "ok", "none; jobs run on the CPU")


def _memory() -> Iterator[Finding]:
    lines = _read("/proc/meminfo").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield memory_finding(free, total, _read("/sys/fs/cgroup/memory.max").strip())


def memory_finding(free: int, total: int, limit: str) -> Finding:
    """`limit`: what the control group of this process may take, in bytes; not a number where there is no limit."""
    found = f"{gigabytes(free)} of {gigabytes(total)} free"
    if limit.isdigit() and int(limit) < total:  # engines size themselves by the machine
        advice = "set engine.kv_memory_gb: its default is a quarter of the machine's memory"
        return Finding(AREA, "memory", "warn", f"{found}; this container may take {gigabytes(int(limit))}", advice)
    if free < LEAST_MEMORY:
        return Finding(AREA, "memory", "warn", found, "end other programs; set engine.kv_memory_gb and fewer workers")
    return Finding(AREA, "memory", "ok", found)


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        found = f"{free / 2**20:,.0f} MiB free in {folder}"
        if free < LEAST_SHARED:
            yield Finding(AREA, "shared memory", "warn", found, "start the container with --shm-size=1g")
        else:
            yield Finding(AREA, "shared memory", "ok", found)


def _folders() -> Iterator[tuple[str, Path]]:
    """Where a job writes on this machine beside its output."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield "models", Path(home)
    yield "Ray's files", Path(os.environ.get("RAY_TMPDIR") or "/tmp")


def _disk(name: str, folder: Path) -> Iterator[Finding]:
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    found = f"{gigabytes(free)} free in {folder}"
    if not os.access(there, os.W_OK):
        yield Finding(AREA, f"disk, {name}", "fail", f"{folder} cannot be written", "set XDG_CACHE_HOME or RAY_TMPDIR")
    elif free < LEAST_DISK:
        yield Finding(AREA, f"disk, {name}", "warn", found, "make room, or set XDG_CACHE_HOME or RAY_TMPDIR")
    else:
        yield Finding(AREA, f"disk, {name}", "ok", found)
