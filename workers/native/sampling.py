"""Picks and best tokens of rows of float32 or bfloat16 logits on CPUs, in one compiled call (`sampling.cpp`).

Shape legend: R rows, V vocabulary, K best tokens.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_void_p
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.native.build import SAMPLING_SOURCE, NativeUnavailable, load_kernels
from workers.randomness import NoiseKey

logger = logging.getLogger(__name__)


class _Logits(Structure):
    _fields_ = [("values", c_void_p), *((name, c_int64) for name in ("rows", "stride", "vocabulary", "threads"))]


class _Sampling(Structure):
    _fields_ = [
        ("top_k", c_int64),
        ("inverse_cdf", c_int64),
        ("temperature", c_float),
        ("top_p", c_double),
        ("min_p", c_double),
    ]


_ARGUMENTS = {
    "pick": [POINTER(_Logits), POINTER(_Sampling), c_void_p, c_void_p, c_void_p],
    "best": [POINTER(_Logits), c_int64, c_void_p, c_void_p],
    "noise_streams": [c_int64, c_void_p, c_void_p, c_void_p],
}


def serves(logits_RV: Tensor) -> bool:
    """Whether the functions below take these logits: on a CPU that has the kernels, in float32 or bfloat16."""
    return logits_RV.is_cpu and logits_RV.dtype in (torch.float32, torch.bfloat16) and _library() is not None


def noise_streams(keys: Sequence[NoiseKey], token_indices: Sequence[int]) -> Tensor:
    """`randomness.streams`, for the few rows of a step in a fraction of the time."""
    flat, indices = array("q", chain.from_iterable(keys)), array("q", token_indices)
    stream_R = torch.empty(len(indices), dtype=torch.int64)
    _entry("noise_streams")(len(indices), flat.buffer_info()[0], indices.buffer_info()[0], stream_R.data_ptr())
    return stream_R


def pick(logits_RV: Tensor, params: SamplingConfig, stream_R: Tensor) -> tuple[Tensor, Tensor | None]:
    """Picked tokens `[R]` and, under inverse-CDF coupling, the float64 bounds `[R, 2]` of the noise that picks them.

    The same function of a row's logits and noise as the tensor operations in workers/sampling.py, up to rounding.
    """
    inverse_cdf = params.coupling == "inverse_cdf"
    token_R = torch.from_numpy(np.empty(len(logits_RV), np.int64))
    bounds_R2 = torch.empty(len(logits_RV), 2, dtype=torch.float64) if inverse_cdf else None
    sampling = _Sampling(params.top_k, inverse_cdf, params.temperature, params.top_p, params.min_p)
    logits_RV, stream_R = _in_place(logits_RV), stream_R.contiguous()
    _entry("pick", logits_RV.dtype)(
        ctypes.byref(_described(logits_RV)),
        ctypes.byref(sampling),
        stream_R.data_ptr(),
        token_R.data_ptr(),
        None if bounds_R2 is None else bounds_R2.data_ptr(),
    )
    return token_R, bounds_R2


def best(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and float32 probabilities `[R, min(k, V)]` at temperature 1, best first, equal ones by ascending id.

    The first one is what `pick` picks at temperature 0.
    """
    k = min(k, logits_RV.shape[1])
    ids_RK, probs_RK = torch.empty(len(logits_RV), k, dtype=torch.int64), torch.empty(len(logits_RV), k)
    logits_RV = _in_place(logits_RV)
    described = _described(logits_RV)
    _entry("best", logits_RV.dtype)(ctypes.byref(described), k, ids_RK.data_ptr(), probs_RK.data_ptr())
    return ids_RK, probs_RK


def _in_place(logits_RV: Tensor) -> Tensor:
    """Logits whose rows are contiguous; the rows themselves may be apart."""
    return logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()


def _described(logits_RV: Tensor) -> _Logits:
    rows, vocabulary = logits_RV.shape
    return _Logits(logits_RV.data_ptr(), rows, logits_RV.stride(0), vocabulary, torch.get_num_threads())


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled library, or None where it cannot be had; why is logged once."""
    try:
        return load_kernels(SAMPLING_SOURCE)
    except NativeUnavailable as error:
        logger.info("tokens are picked by tensor operations instead of compiled kernels: %s", error)
        return None


@functools.cache
def _entry(name: str, dtype: torch.dtype | None = None) -> Callable[..., None]:
    library = _library()
    assert library is not None
    entry = getattr(library, name if dtype is None else f"{name}_{str(dtype).removeprefix('torch.')}")
    entry.argtypes, entry.restype = _ARGUMENTS[name], None
    return cast(Callable[..., None], entry)
