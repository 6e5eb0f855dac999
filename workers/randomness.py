"""Noise as a pure function of (job seed, sample uid, sample index, token index, token id).

Nothing is ever drawn from a generator that advances, so the noise of a token does not depend on step, batch row, worker
or attempt. The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used
as a counter-based hash: `mix64(stream + GAMMA * counter)`, with one stream per (seed, uid, sample, token index), keyed
through BLAKE2b. It was preferred to NumPy's Philox because it gives random access to the noise of a few kept tokens
(after top-p some tens of 49,152), and runs unchanged on any torch device.

Shape legend: R rows, K candidates per row.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s = TypeVar("Int64s", Tensor, npt.NDArray[np.int64])


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer (torch has no uint64 arithmetic)."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)

NoiseKey = tuple[int, int]
"""128 bits that identify a sample, as two signed 64-bit integers."""


def noise_key(seed: int, uid: str, sample_index: int) -> NoiseKey:
    """Key of one sample's noise. The length prefix keeps (1, "2x") and (12, "x") apart."""
    text = f"{seed}:{sample_index}:{uid}".encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"sevenleague").digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


def key_of_set(key: NoiseKey, index: int) -> NoiseKey:
    """Key of one of several sets of noise of a sample (see `noise_sets`); set 0 is its ordinary noise."""
    return key[0], key[1] ^ _signed(index * _GAMMA % 2**64)


def _logical_shift_right(x: Int64s, bits: int) -> Int64s:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Int64s) -> Int64s:
    """SplitMix64's finalizer: a bijection of 64 bits in which each input bit flips each output bit half the time.

    Signed integers wrap around alike in tensors and arrays, and on a few numbers arrays are several times as fast.
    """
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def streams(keys: list[NoiseKey], token_indices: list[int], device: torch.device | str = "cpu") -> Tensor:
    """One noise stream per row: int64 `[R]` for R (sample, index of the generated token) pairs."""
    keys_R2 = np.array(keys, np.int64).reshape(-1, 2)
    index_R = np.array(token_indices, np.int64)
    return torch.from_numpy(_mix64(_mix64(keys_R2[:, 0] + index_R * _GAMMA) ^ keys_R2[:, 1])).to(device)


def uniforms(stream_R: Tensor) -> Tensor:
    """One number in [0, 1) per row, float64 `[R]`, for inverse-CDF coupling.

    It has 24 bits, so that it is exact in float32 too: PTP models see the very number that picks the token.
    """
    if stream_R.device.type == "cpu":
        return torch.from_numpy(_logical_shift_right(_mix64(stream_R.numpy()), 40) * 2.0**-24)
    return _logical_shift_right(_mix64(stream_R), 40).double() * 2.0**-24


def gumbels(stream_R: Tensor, token_ids_RK: Tensor) -> Tensor:
    """Standard Gumbel noise of each (row, token id), float32 `[R, K]`.

    -log(E) with E = -log1p(-u) exponential: large values, which decide, come from u near 0, where float32 is finest.
    """
    bits_RK = _mix64(stream_R[:, None] + (token_ids_RK + 1) * _GAMMA)
    uniform_RK = (_logical_shift_right(bits_RK, 32).float() + 0.5) * 2.0**-32
    return -(-(-uniform_RK.clamp(max=1 - 2.0**-24)).log1p()).log()
