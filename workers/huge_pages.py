"""Memory in pages of 2 MiB, where Linux grants them on request.

Through pages of 4 KiB a core looks up an address every 64 cache lines, and fetching ahead ends at each page's end: two
cores read weights a good tenth faster from large pages (docs/kernels.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 64 << 20
"""Bytes asked for at once. Pages are given when they are first written to, so what stays unused costs nothing."""

ALIGNMENT = 64


class HugePages:
    """Keeps tensors side by side, so that small ones share a page. The memory lives as long as any of them."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the tensor."""
        size = tensor.numel() * tensor.element_size()
        if size > len(self._free):
            self._free = _chunk(max(size, CHUNK))
        own = self._free[:size].view(tensor.dtype).view(tensor.shape)
        self._free = self._free[-(-size // ALIGNMENT) * ALIGNMENT :]
        return own.copy_(tensor)


def _chunk(size: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return torch.frombuffer(memory, dtype=torch.uint8, offset=-address % PAGE, count=size)
