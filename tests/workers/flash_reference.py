"""A `FlashKernel` in plain operations, for any device and precision. What the contract leaves undefined is NaN here."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_flash(
    query_NHD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """X = max_k columns are gathered for every query. Nothing waits for the device, so it can be captured."""
    assert {cu_q.dtype, cu_k.dtype, used_k.dtype} == {torch.int32}
    if query_NHD.device.type == "cpu":
        _check(query_NHD, cu_q, used_k, max_q, max_k)
    N, H, D = query_NHD.shape
    C, K, _ = key_CKD.shape
    row_N = torch.arange(N, device=query_NHD.device)
    block_N = (torch.searchsorted(cu_q, row_N, right=True) - 1).clamp(max=len(used_k) - 1)
    inner_N, count_N, used_N = row_N - cu_q[block_N], (cu_q[1:] - cu_q[:-1])[block_N], used_k[block_N]
    limit_N = torch.minimum(used_N, inner_N + used_N - count_N + 1) if causal else used_N
    column_X = torch.arange(max_k, device=query_NHD.device)
    visible_NX = column_X < limit_N[:, None]
    flat_NX = (cu_k[block_N][:, None] + column_X).clamp(max=C - 1)
    key_NXKD = key_CKD[flat_NX].masked_fill(~visible_NX[:, :, None, None], 0.0)
    value_NXKD = value_CKD[flat_NX].masked_fill(~visible_NX[:, :, None, None], 0.0)
    query_NKGD = query_NHD.reshape(N, K, H // K, D)
    scores_NKGX = torch.einsum("nkgd,nxkd->nkgx", query_NKGD, key_NXKD) * scale
    scores_NKGX = scores_NKGX.masked_fill(~visible_NX[:, None, None], -torch.inf)
    undefined_N = (row_N >= cu_q[-1]) | (limit_N <= 0)
    out_NHD = torch.einsum("nkgx,nxkd->nkgd", scores_NKGX.softmax(-1), value_NXKD).reshape(N, H, D)
    lse_NH = scores_NKGX.logsumexp(-1).reshape(N, H)
    out_NHD = out_NHD.masked_fill(undefined_N[:, None, None], torch.nan)
    return out_NHD, lse_NH.masked_fill(undefined_N[:, None], torch.inf).T


def _check(query_NHD: Tensor, cu_q: Tensor, used_k: Tensor, max_q: int, max_k: int) -> None:
    counts = cu_q.diff()
    assert len(cu_q) == len(used_k) + 1
    assert int(counts.min()) >= 0
    assert int(counts.max()) <= max_q
    assert int(used_k.max()) <= max_k
    assert int(cu_q[-1]) <= len(query_NHD)
    if max_q == 1:
        assert counts.tolist() == [1] * len(query_NHD)
