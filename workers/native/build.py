"""Compile the kernels for this machine's CPU, once, into the user's cache folder.

A few seconds when cold (one C++ file without torch's headers), nothing when warm. The library is bound to the OpenMP
runtime that torch has loaded, so both share one pool of threads: a second pool would fight the first for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock

from workers.model_files import cache_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")
COMPILE_TIMEOUT_S = 120


class NativeUnavailable(Exception):
    """This machine cannot build or load the kernels; the message says why."""


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """The compiled library. Raises NativeUnavailable when there is no compiler, no AVX-512 or no OpenMP runtime."""
    features = cpu_features()
    if "avx512f" not in features or "avx512bw" not in features:
        raise NativeUnavailable("the CPU has no AVX-512")
    compiler = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))),
        None,
    )
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (CXX, c++, g++ or clang++)")
    library = cache_folder() / "native" / f"{_key(compiler, features)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # torch was built without the OpenMP runtime that this compiler uses
        raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU, as Linux names them; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _key(compiler: str, features: frozenset[str]) -> str:
    """Changes with the source, the flags, the compiler and the CPU: a cache folder may be shared by machines."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, " ".join(sorted(features)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Written under another name and renamed, so that no other process loads half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        # Linked without -fopenmp: its symbols are found in the runtime that torch has loaded.
        commands = (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(built)],
            [compiler, "-shared", str(built), "-o", str(library)],
        )
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NativeUnavailable(f"the C++ compiler failed: {error}") from error
            if done.returncode != 0:
                raise NativeUnavailable(f"the C++ compiler failed: {done.stderr.strip()[-500:]}")
        library.replace(path)
