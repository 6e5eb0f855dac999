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
SAMPLING_SOURCE = Path(__file__).with_name("sampling.cpp")
DRAFTING_SOURCE = Path(__file__).with_name("drafting.cpp")
SLOTS_SOURCE = Path(__file__).with_name("slots.cpp")
AVX512 = ("avx512f", "avx512bw")
# No contraction: whether a product and a sum become one instruction must not depend on the shape of a tile.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")
COMPILE_TIMEOUT_S = 120


class NativeUnavailable(Exception):
    """This machine cannot build or load the kernels; the message says why."""


@functools.cache
def load_kernels(source: Path | None = None, needs: tuple[str, ...] = AVX512) -> ctypes.CDLL:
    """The library compiled from a source, `SOURCE` unless given, which needs these instruction sets.

    Raises NativeUnavailable when there is no compiler, no AVX-512 where it is needed, or no OpenMP runtime.
    """
    source = source or SOURCE
    features = cpu_features()
    if not features.issuperset(needs):
        raise NativeUnavailable("the CPU has no AVX-512")
    compiler = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))),
        None,
    )
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (CXX, c++, g++ or clang++)")
    library = _build(compiler, features, source)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # torch was built without the OpenMP runtime that this compiler uses
        raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def keeping_the_lock(library: ctypes.CDLL) -> ctypes.PyDLL:
    """The same functions for calls that keep the interpreter's lock: to let go of it and to wait for it again would
    take longer than a short one.
    """
    return ctypes.PyDLL(library._name, handle=library._handle)


def _build(compiler: str, features: frozenset[str], source: Path) -> Path:
    """The library in the cache folder, made by whichever process comes first."""
    try:
        library = cache_folder() / "native" / f"{_key(compiler, features, source)}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(library.with_suffix(".lock")):
                if not library.exists():
                    _compile(compiler, source, library)
    except (OSError, RuntimeError) as error:  # no home, no room, no right to write
        raise NativeUnavailable(f"the compiled kernels cannot be kept in the cache folder: {error}") from error
    return library


@functools.cache
def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU, as Linux names them; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _key(compiler: str, features: frozenset[str], source: Path | None = None) -> str:
    """Changes with the source, the headers beside it, the flags, the compiler and the CPU: machines may share a cache
    folder.
    """
    version = _run([compiler, "--version"])
    source = source or SOURCE
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*texts, " ".join(FLAGS), version, " ".join(sorted(features)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Written under another name and renamed, so that no other process loads half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built, library = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        # Linked without -fopenmp: its symbols are found in the runtime that torch has loaded.
        _run([compiler, *FLAGS, "-c", str(source), "-o", str(built)])
        _run([compiler, "-shared", str(built), "-o", str(library)])
        library.replace(path)


def _run(command: list[str]) -> str:
    """Raises NativeUnavailable with the start of what the compiler said when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C++ compiler failed: {error}") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"the C++ compiler failed: {' '.join(done.stderr.split())[:300] or command[0]}")
    return done.stdout
