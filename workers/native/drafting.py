"""The compiled state of the drafter of strategy `auto` (`drafting.cpp`): what it is told and asked, as flat arrays."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_double, c_int64, c_void_p

from workers.native.build import DRAFTING_SOURCE, keeping_the_lock, load_kernels

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "drafter_new": (c_void_p, [c_int64, c_int64]),
    "drafter_free": (None, [c_void_p]),
    "drafter_start": (None, [c_void_p, c_int64, c_char_p, c_int64, c_void_p, c_int64, c_int64]),
    "drafter_propose": (c_int64, [c_void_p, c_void_p, c_int64, c_double, *[c_void_p] * 5]),
    "drafter_observe": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "drafter_finish": (None, [c_void_p, c_int64, c_void_p, c_int64]),
}


@functools.cache
def library() -> ctypes.PyDLL:
    """The functions of `drafting.cpp`.

    Raises NativeUnavailable where they cannot be compiled.
    """
    functions = keeping_the_lock(load_kernels(DRAFTING_SOURCE, needs=()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions
