"""Memory in large pages: the same values, side by side, and gone with the last tensor."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from workers.huge_pages import ALIGNMENT, CHUNK, PAGE, HugePages


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024


def test_copies_keep_their_values_and_do_not_overlap() -> None:
    pages = HugePages()
    sources = [torch.full((i, 3, 7), i, dtype=dtype) for i in range(1, 9) for dtype in (torch.bfloat16, torch.float32)]
    copies = [pages.copy(source.transpose(0, 1)) for source in sources]
    large = pages.copy(torch.arange(CHUNK // 8 + 1))
    for source, copy in zip(sources, copies, strict=True):
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT == 0
        assert torch.equal(copy, source.transpose(0, 1))
    assert torch.equal(large, torch.arange(CHUNK // 8 + 1))
    assert copies[-1].data_ptr() - copies[0].data_ptr() < PAGE


def test_memory_lives_as_long_as_a_tensor() -> None:
    pages = HugePages()
    kept, dropped = pages.copy(torch.ones(CHUNK // 2, dtype=torch.uint8)), HugePages().copy(torch.ones(CHUNK // 4))
    before = resident_mib()
    del pages, dropped
    gc.collect()
    assert before - resident_mib() >= CHUNK // 2**20 - 8
    assert kept.sum() == CHUNK // 2


def test_what_the_machine_does_not_have_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"^\d+ bytes: "):
        HugePages().copy(torch.ones(1, dtype=torch.uint8).expand(2**45))
