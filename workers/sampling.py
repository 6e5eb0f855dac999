"""`adapt` logits to a distribution and `pick` a token from it: the one place, for sampling, verification and log-probs.

Order of adaptation (algorithms.md section 1): penalties, temperature, top-k, top-p, min-p, each on the renormalised
rest, in float32 (float64 for a float64 model). Temperature 0 is the argmax of the same penalised logits.

Ties are broken the same way whatever batch a row is in: top-k keeps all tokens that tie with the k-th (as HF does), and
top-p walks equal logits by ascending token id. In bf16 ties are common, so this matters.

On CPUs with compiled kernels (`workers/native/sampling.py`) `pick` leaves float32 and bfloat16 logits to them; the
tensor operations below serve every device and data type, and say what the kernels compute.

Shape legend: R rows, V vocabulary, K candidates, N (row, seen token) pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.native import sampling as native
from workers.randomness import NoiseKey, gumbels, streams, uniforms

_TIE_ROOM = 64
"""Candidates taken beyond top-k so that tokens that tie with the k-th are seen."""


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The hypothetical prefix of a row, for penalties: counts of its prompt and of its output tokens."""

    prompt: frozenset[int]
    output: Counter[int]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Distributions over the kept tokens of each row, in ascending order of token id.

    `logp_RK` is -inf for tokens that were dropped; `ids_RK` is None when K = V and column v is token v.
    """

    logp_RK: Tensor
    ids_RK: Tensor | None = None

    def token_ids(self, column_R: Tensor) -> Tensor:
        return column_R if self.ids_RK is None else self.ids_RK.gather(1, column_R[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Picks:
    """Picked tokens `[R]`; for inverse-CDF coupling also the interval [low, high) of the noise that picks them.

    `sets` are the sets that the noise is of, one for each row where rows have several to choose from (`noise_sets`).
    """

    token_R: Tensor
    low_R: Tensor | None = None
    high_R: Tensor | None = None
    sets: tuple[int, ...] = ()


def widened(logits_RV: Tensor) -> Tensor:
    """Logits in the precision of sampling: float32, or float64 for a float64 model."""
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))


def penalize(logits_RV: Tensor, params: SamplingConfig, histories: Sequence[RowHistory]) -> Tensor:
    """Repetition penalty (prompt and output), presence and frequency penalties (output), as in HF and OpenAI's API."""
    logits_RV = logits_RV.clone()
    outputs = [history.output for history in histories]
    if params.repetition_penalty != 1.0:
        seen = _pairs([part for h in histories for part in (h.prompt, h.output)], 2, logits_RV.device)
        logits_N = logits_RV[seen]  # a token of both prompt and output comes twice, with the same result
        factor = params.repetition_penalty
        logits_RV[seen] = torch.where(logits_N > 0, logits_N / factor, logits_N * factor)
    if params.presence_penalty or params.frequency_penalty:
        count_N = torch.tensor([count for output in outputs for count in output.values()]).to(logits_RV)
        logits_RV[_pairs(outputs, 1, logits_RV.device)] -= params.presence_penalty + params.frequency_penalty * count_N
    return logits_RV


def _pairs(tokens: Sequence[Collection[int]], parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index tensors `[N]` of rows and token ids; row r's ids are in tokens[r * parts : (r + 1) * parts]."""
    rows = np.repeat(np.arange(len(tokens)) // parts, [len(ids) for ids in tokens])
    ids = np.fromiter(chain.from_iterable(tokens), np.int64, len(rows))
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def adapt(logits_RV: Tensor, params: SamplingConfig) -> list[tuple[Tensor, Adapted]]:
    """Distributions of R rows of (penalised) logits at temperature > 0.

    Returned as groups (row indices, distributions of these rows), which together hold every row once: top-p keeps tens
    of tokens in most rows and thousands in a few, and each group has its own K.
    """
    assert params.temperature > 0
    scaled_RV = logits_RV / params.temperature
    rows_R = torch.arange(len(scaled_RV), device=scaled_RV.device)
    vocabulary = scaled_RV.shape[1]
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return [(rows_R, Adapted(scaled_RV.log_softmax(-1)))]
    groups = []
    widths = (params.top_k + _TIE_ROOM,) if params.top_k else (64, 1024)
    for width in (*widths, vocabulary):
        width = min(width, vocabulary)
        top_RK, ids_RK = scaled_RV.topk(width, dim=-1)
        order_RK = ids_RK.argsort(-1)
        ids_RK, top_RK = ids_RK.gather(1, order_RK), top_RK.gather(1, order_RK)
        total_R1 = scaled_RV.logsumexp(-1, keepdim=True)
        logp_RK = _truncate(top_RK - total_R1, params)
        edge_R = top_RK.amin(-1)
        least_kept_R = top_RK.masked_fill(logp_RK == -torch.inf, torch.inf).amin(-1)
        # Tokens outside the candidates are at most at the edge: they cannot be kept if nothing at the edge was.
        done_R = (least_kept_R > edge_R) | (width == vocabulary)
        groups.append((rows_R[done_R], Adapted(logp_RK[done_R], ids_RK[done_R])))
        rows_R, scaled_RV = rows_R[~done_R], scaled_RV[~done_R]
        if not len(rows_R):
            break
    return [group for group in groups if len(group[0])]


def _truncate(logp_RK: Tensor, params: SamplingConfig) -> Tensor:
    """Top-k, top-p and min-p on candidates in ascending order of id; dropped tokens become -inf, the rest sums to 1."""
    if 0 < params.top_k < logp_RK.shape[1]:
        kth_R1 = logp_RK.topk(params.top_k, dim=-1).values[:, -1:]
        logp_RK = logp_RK.masked_fill(logp_RK < kth_R1, -torch.inf).log_softmax(-1)
    if params.top_p < 1.0:
        sorted_RK, order_RK = logp_RK.sort(dim=-1, descending=True, stable=True)
        before_RK = sorted_RK.exp().cumsum(-1) - sorted_RK.exp()
        drop_RK = torch.zeros_like(before_RK, dtype=torch.bool).scatter(1, order_RK, before_RK >= params.top_p)
        logp_RK = logp_RK.masked_fill(drop_RK, -torch.inf)
    if params.min_p > 0.0:
        floor_R1 = logp_RK.amax(-1, keepdim=True) + torch.tensor(params.min_p, dtype=logp_RK.dtype).log()
        logp_RK = logp_RK.masked_fill(logp_RK < floor_R1, -torch.inf)
    return logp_RK.log_softmax(-1)


def _pick_gumbel(adapted: Adapted, stream_R: Tensor) -> Picks:
    """argmax of log p + Gumbel noise keyed by token id (arXiv 2408.07978): small shifts of mass rarely move the
    pick.
    """
    logp_RK = adapted.logp_RK
    ids_RK = adapted.ids_RK
    if ids_RK is None:
        ids_RK = torch.arange(logp_RK.shape[1], device=logp_RK.device)[None]
    return Picks(adapted.token_ids((logp_RK + gumbels(stream_R, ids_RK)).argmax(-1)))


def cumulative(adapted: Adapted) -> Tensor:
    """F `[R, K]` of inverse-CDF coupling: float64 sums in vocabulary order, exactly 1 from the last kept token on.

    Column j is picked by noise in [F_(j-1), F_j), column 0 by noise in [0, F_0).
    """
    probs_RK = adapted.logp_RK.double().exp()
    cdf_RK = probs_RK.cumsum(-1)
    cdf_RK = cdf_RK / cdf_RK[:, -1:]
    column_K = torch.arange(cdf_RK.shape[1], device=cdf_RK.device)
    last_kept_R1 = torch.where(probs_RK > 0, column_K, 0).amax(-1, keepdim=True)
    return cdf_RK.masked_fill(column_K >= last_kept_R1, 1.0)


def _pick_inverse_cdf(adapted: Adapted, stream_R: Tensor) -> Picks:
    return pick_at(adapted, uniforms(stream_R))


def pick_at(adapted: Adapted, u_R: Tensor) -> Picks:
    """min{j : F_j > u} in vocabulary order, F a float64 sum (arXiv 2512.21323): the coupling that PTP needs."""
    cdf_RK = cumulative(adapted)
    column_R1 = torch.searchsorted(cdf_RK, u_R[:, None], right=True)
    high_R1 = cdf_RK.gather(1, column_R1)
    low_R1 = torch.where(column_R1 > 0, cdf_RK.gather(1, (column_R1 - 1).clamp(min=0)), 0.0)
    return Picks(adapted.token_ids(column_R1[:, 0]), low_R1[:, 0], high_R1[:, 0])


def noise_of(keys: list[NoiseKey], token_indices: list[int], logits_RV: Tensor, *, compiled: bool = True) -> Tensor:
    """The noise streams `[R]` of rows that are to be picked from these logits (`randomness.streams`)."""
    if compiled and native.serves(logits_RV):
        return native.noise_streams(keys, token_indices)
    return streams(keys, token_indices, logits_RV.device)


def pick(logits_RV: Tensor, params: SamplingConfig, stream_R: Tensor, *, compiled: bool = True) -> Picks:
    """The token that plain decoding emits after each row, given the row's (penalised) logits and noise stream.

    A pure function of the row: which other rows are picked in the same call does not matter. Picks have bounds only
    under inverse-CDF coupling; at temperature 0 those of every token are [0, 1). `compiled` allows the CPU's kernels.
    """
    if not compiled or not native.serves(logits_RV):
        return pick_by_tensors(widened(logits_RV), params, stream_R)
    token_R, bounds_R2 = native.pick(logits_RV, params, stream_R)
    return Picks(token_R) if bounds_R2 is None else Picks(token_R, bounds_R2[:, 0], bounds_R2[:, 1])


def pick_by_tensors(logits_RV: Tensor, params: SamplingConfig, stream_R: Tensor) -> Picks:
    """`pick` on any device, from logits in the precision of sampling."""
    if params.temperature == 0.0:
        token_R = logits_RV.argmax(-1)
        if params.coupling == "gumbel":
            return Picks(token_R)
        low_R = torch.zeros(len(token_R), dtype=torch.float64, device=token_R.device)
        return Picks(token_R, low_R, low_R + 1.0)
    pick_group = _pick_gumbel if params.coupling == "gumbel" else _pick_inverse_cdf
    groups = adapt(logits_RV, params)
    if len(groups) == 1:
        return pick_group(groups[0][1], stream_R)
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    bounds_2R = torch.empty(2, len(logits_RV), dtype=torch.float64, device=logits_RV.device)
    for rows, adapted in groups:
        picks = pick_group(adapted, stream_R[rows])
        token_R[rows] = picks.token_R
        if picks.low_R is not None and picks.high_R is not None:
            bounds_2R[0, rows], bounds_2R[1, rows] = picks.low_R, picks.high_R
    return Picks(token_R, bounds_2R[0], bounds_2R[1]) if params.coupling == "inverse_cdf" else Picks(token_R)


def scores(logits_1V: Tensor, params: SamplingConfig, stream_1: Tensor) -> Tensor:
    """What `pick` maximises, dense `[V]`: logits when greedy, log p + noise under Gumbel coupling.

    Under inverse-CDF coupling: minus the distance of u from the token's interval (0 for the token that is picked).
    The gap between two tokens' scores is how far a rounding error would have to move things to swap them.
    """
    if params.temperature == 0.0:
        return logits_1V[0]
    ((_, adapted),) = adapt(logits_1V, params)
    logp_V = torch.full_like(logits_1V[0], -torch.inf)
    ids_K = torch.arange(len(logp_V)) if adapted.ids_RK is None else adapted.ids_RK[0]
    logp_V[ids_K] = adapted.logp_RK[0]
    if params.coupling == "gumbel":
        return logp_V + gumbels(stream_1, torch.arange(len(logp_V))[None])[0]
    cdf_V = logp_V.double().exp().cumsum(0)
    u = uniforms(stream_1)[0]
    return -torch.maximum(torch.cat((cdf_V.new_zeros(1), cdf_V[:-1])) - u, u - cdf_V).clamp(min=0)
