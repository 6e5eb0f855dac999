"""Inputs of auxiliary slots in one compiled call (`slots.cpp`), for adapters whose base runs through the kernels.

Shape legend: R slots of all windows, E hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int64, c_void_p
from itertools import chain

import torch
from torch import Tensor

from workers.native.build import SLOTS_SOURCE, NativeUnavailable, keeping_the_lock, load_kernels
from workers.ptp.auxiliary_embedding import FEATURES, AuxiliaryEmbedding
from workers.randomness import NoiseKey

NOTHING = -1
"""In place of a token index: the slot is shown no noise; in place of a token: none is added."""


class _Slots(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "hidden", "kind", "features")),
        *((name, c_void_p) for name in ("key", "index", "token", "weight", "start", "embedding")),
    ]


class NativeSlots:
    """What an adapter shows its slots, and the call that makes it. Raises NativeUnavailable."""

    def __init__(self, embedding: AuxiliaryEmbedding, tokens_VE: Tensor) -> None:
        """`tokens_VE` are the base's token embeddings, in the dtype that inputs shall have."""
        name = f"slots_{str(tokens_VE.dtype).removeprefix('torch.')}"
        found = getattr(keeping_the_lock(load_kernels(SLOTS_SOURCE)), name, None)
        if found is None:
            raise NativeUnavailable(f"slots are not compiled for {tokens_VE.dtype}")
        found.argtypes, found.restype = [POINTER(_Slots), c_void_p], None
        self._function = found
        self._tokens_VE = tokens_VE.detach()
        self._weight_FE = embedding.weight.detach().T.contiguous()
        self._start_E = None if embedding.start is None else embedding.start.detach().contiguous()
        self._kind = list(FEATURES).index(embedding.kind)

    def __call__(self, keys: Sequence[NoiseKey], indices: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Inputs `[R, E]` of slots that are shown the noise of output token `indices[r]` of the sample with `keys[r]`,
        and the embedding of `tokens[r]`; see `NOTHING`.
        """
        hidden = self._tokens_VE.shape[1]
        inputs_RE = torch.empty(len(indices), hidden, dtype=self._tokens_VE.dtype)
        flat_keys = array("q", chain.from_iterable(keys))
        rows = [flat_keys, array("q", indices), array("q", tokens)]
        slots = _Slots(
            len(indices),
            hidden,
            self._kind,
            len(self._weight_FE),
            *(values.buffer_info()[0] for values in rows),
            self._weight_FE.data_ptr(),
            None if self._start_E is None else self._start_E.data_ptr(),
            self._tokens_VE.data_ptr(),
        )
        self._function(ctypes.byref(slots), inputs_RE.data_ptr())
        return inputs_RE
