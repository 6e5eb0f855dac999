"""The real kernel against the plain one that the CPU tests put in its place."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.workers.flash_reference import reference_flash
from workers.varlen_attention import flash_attention, folded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPACITY = 1024
CASES = {
    # queries of each block, columns it sees, causal
    "single": ([1] * 5, [1, 17, 300, 1000, 1024], False),
    "prefix": ([3, 1, 0, 16, 7], [5, 0, 40, 1000, 700], False),
    "causal": ([100, 70, 300], [100, 900, 300], True),
}


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (14, 2)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_keeps_its_contract(case: str, heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> None:
    """Output and log-sum-exp; slots out of order, unused ones between them, padding rows behind the last query."""
    counts, used, causal = CASES[case]
    H, K = heads
    padding = 0 if case == "single" else 3
    torch.manual_seed(0)
    query_NHD = torch.randn(sum(counts) + padding, H, head_size, device="cuda", dtype=dtype)
    key_CKD, value_CKD = torch.randn(2, 12 * CAPACITY, K, head_size, device="cuda", dtype=dtype)
    slots = [7, 0, 3, 11, 4][: len(counts)]
    cu_q = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([*(slot * CAPACITY for slot in slots), 0], dtype=torch.int32, device="cuda")
    used_k = torch.tensor(used, dtype=torch.int32, device="cuda")
    most = max(counts)
    if case == "prefix":  # as trees call it: query heads folded into rows
        query_NHD, cu_q, most = folded(query_NHD, K), cu_q * (H // K), most * (H // K)
    arguments = (cu_q, cu_k, used_k, most, CAPACITY, head_size**-0.5)
    out, lse = flash_attention(query_NHD, key_CKD, value_CKD, *arguments, causal=causal)
    wide = (x.float() for x in (query_NHD, key_CKD, value_CKD))
    expected_out, expected_lse = reference_flash(*wide, *arguments, causal=causal)
    defined = expected_lse.isfinite().all(0)
    assert defined.any()
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.003
    torch.testing.assert_close(out[defined].float(), expected_out[defined], rtol=tolerance, atol=tolerance)
    if case == "prefix":  # the only case whose log-sum-exp is used
        torch.testing.assert_close(lse[:, defined], expected_lse[:, defined], rtol=1e-3, atol=1e-3)
