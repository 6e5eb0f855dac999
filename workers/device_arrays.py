"""The arrays of a step on the device, in one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.step_shape import Arrays

_ALIGNMENT = 16


class DeviceArrays:
    """Arrays side by side in one buffer on the device, so that a step takes one copy; `views` are tensors into it."""

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._names = tuple(arrays)
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        self._begins = np.cumsum([0, *sizes])
        self._buffer = torch.empty(int(self._begins[-1]), dtype=torch.uint8, device=device)
        self.views: dict[str, Tensor] = {}
        for begin, (name, array) in zip(self._begins, arrays.items(), strict=False):
            dtype = torch.from_numpy(array[:0]).dtype
            flat = self._buffer[begin : begin + array.nbytes].view(dtype)
            self.views[name] = flat.view(array.shape)
        self.fill(arrays)

    def fill(self, arrays: Arrays) -> None:
        """Copy arrays of the same names and sizes into the same places."""
        assert tuple(arrays) == self._names
        host = np.zeros(len(self._buffer), dtype=np.uint8)
        for begin, array in zip(self._begins, arrays.values(), strict=False):
            host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._buffer.copy_(torch.from_numpy(host))
