"""From the logits of a step to picked tokens, candidates for drafters and per-token values for the output.

Shape legend: S sampled rows of a step, E rows whose picks were emitted, V vocabulary, K candidates per row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.native import sampling as native
from workers.noise_sets import sets_of_rows
from workers.planned_block import PlannedBlock
from workers.randomness import key_of_set
from workers.sampling import Picks, RowHistory, noise_of, penalize, pick, widened
from workers.sequence import Sequence

Candidates = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Ids and probabilities `[S, K]` of the model's best tokens after each row, best first."""

_NO_NOISE = torch.empty(0, dtype=torch.int64)
"""The noise streams of rows that are picked at temperature 0."""


def pick_rows(sampled: Seq[PlannedBlock], logits_SV: Tensor, *, compiled: bool = True) -> Picks:
    """The token after every sampled row, picked with the noise of that row's own position.

    Requests with different sampling parameters are picked group by group; the result does not depend on the grouping.
    """
    kinds = dict.fromkeys(_kinds(sampled))
    if len(kinds) == 1:
        return _picked(sampled, logits_SV, next(iter(kinds)), compiled=compiled)
    params = [item.sequence.context.sampling for item in sampled for _ in item.block.sampled]
    token_S = torch.empty(len(params), dtype=torch.int64, device=logits_SV.device)
    bounds_2S = torch.zeros(2, len(params), dtype=torch.float64, device=logits_SV.device)
    sets = [0] * len(params)
    for kind in kinds:
        rows = [i for i, one in enumerate(params) if one == kind]
        row_R = torch.tensor(rows, device=logits_SV.device)
        members = [item for item in sampled if item.sequence.context.sampling == kind]
        picks = _picked(members, logits_SV[row_R], kind, compiled=compiled)
        token_S[row_R] = picks.token_R
        if picks.low_R is not None and picks.high_R is not None:
            bounds_2S[0, row_R], bounds_2S[1, row_R] = picks.low_R, picks.high_R
        for row, chosen in zip(rows, picks.sets, strict=False):
            sets[row] = chosen
    return Picks(token_S, bounds_2S[0], bounds_2S[1], tuple(sets) if any(kind.chooses_noise for kind in kinds) else ())


def _kinds(sampled: Seq[PlannedBlock]) -> list[SamplingConfig]:
    """The parameters of all rows, mostly one object: comparing them for each row would take as long as picking."""
    every = [item.sequence.context.sampling for item in sampled]
    return list({id(kind): kind for kind in every}.values())


def _picked(sampled: Seq[PlannedBlock], logits_SV: Tensor, kind: SamplingConfig, *, compiled: bool) -> Picks:
    """The picks of blocks that are all sampled alike."""
    logits_SV = _penalized(sampled, logits_SV, kind)
    if kind.temperature == 0.0:
        return pick(logits_SV, kind, _NO_NOISE, compiled=compiled)
    keys = [item.sequence.noise for item in sampled for _ in item.block.sampled]
    indices = [index for item in sampled for index in item.token_indices]
    if not kind.chooses_noise:
        return pick(logits_SV, kind, noise_of(keys, indices, logits_SV, compiled=compiled), compiled=compiled)
    sets = sets_of_rows(sampled, logits_SV, compiled=compiled)
    keys = [key_of_set(key, chosen) for key, chosen in zip(keys, sets, strict=True)]
    picks = pick(logits_SV, kind, noise_of(keys, indices, logits_SV, compiled=compiled), compiled=compiled)
    return replace(picks, sets=tuple(sets))


def _penalized(sampled: Seq[PlannedBlock], logits_SV: Tensor, params: SamplingConfig) -> Tensor:
    if not params.has_penalties:
        return logits_SV
    return penalize(widened(logits_SV), params, [history for item in sampled for history in _histories(item)])


def _histories(item: PlannedBlock) -> list[RowHistory]:
    """The hypothetical prefix of each sampled row: the committed tokens and the row's own branch.

    Rows beyond the tree only guess, so the committed tokens will do for them.
    """
    assert item.proposal is not None
    committed = item.sequence.history(())
    branches = [committed]
    for token, parent in zip(item.proposal.draft.tokens, item.proposal.draft.parents, strict=True):
        output = branches[parent + 1].output.copy()
        output[token] += 1
        branches.append(RowHistory(committed.prompt, output))
    return branches + [committed] * (len(item.block.sampled) - len(branches))


def picks_the_best(sampled: Seq[PlannedBlock]) -> bool:
    """Whether the pick after every row is the model's best token, and nothing else is asked about it."""
    kinds = _kinds(sampled)
    return all(k.temperature == 0.0 and k.coupling == "gumbel" and not k.has_penalties for k in kinds)


def top_candidates(logits_SV: Tensor, k: int, *, compiled: bool = True) -> Candidates:
    """The K best tokens of each row with their probabilities at temperature 1, for drafters that recycle them."""
    if compiled and native.serves(logits_SV):
        ids_SK, probs_SK = native.best(logits_SV, k)
        return ids_SK.numpy(), probs_SK.numpy()
    wide_SV = logits_SV.float()
    top_SK, ids_SK = wide_SV.topk(min(k, wide_SV.shape[1]), dim=-1)
    probs_SK = (top_SK - wide_SV.logsumexp(-1, keepdim=True)).exp()
    return ids_SK.cpu().numpy(), probs_SK.cpu().numpy()


def record_extras(
    emitted: Seq[tuple[Sequence, Seq[int]]], picks: Picks, logits_SV: Tensor, wanted: frozenset[str]
) -> None:
    """Append per-token values of the emitted rows to their sequences; log-probabilities are those of temperature 1."""
    rows_E = torch.tensor([row for _, rows in emitted for row in rows], device=logits_SV.device)
    owners = [sequence for sequence, rows in emitted for _ in rows]
    if "logprobs" in wanted or "topk" in wanted:
        logp_EV = widened(logits_SV[rows_E]).log_softmax(-1)
        for sequence, value in zip(owners, logp_EV.gather(1, picks.token_R[rows_E, None])[:, 0].tolist(), strict=True):
            sequence.extras.logprobs.append(value)
    if "topk" in wanted:
        k = max(sequence.request.sampling.logprobs for sequence in owners)
        top_EK, ids_EK = logp_EV.topk(min(k, logp_EV.shape[1]), dim=-1)
        for sequence, ids, values in zip(owners, ids_EK.tolist(), top_EK.tolist(), strict=True):
            own = sequence.request.sampling.logprobs
            sequence.extras.topk_ids.append(tuple(ids[:own]))
            sequence.extras.topk_logprobs.append(tuple(values[:own]))
    if "cdf" in wanted:
        assert picks.low_R is not None, "cdf needs inverse-CDF coupling"
        assert picks.high_R is not None
        low_E, high_E = picks.low_R[rows_E].tolist(), picks.high_R[rows_E].tolist()
        for sequence, low, high in zip(owners, low_E, high_E, strict=True):
            sequence.extras.cdf_low.append(low)
            sequence.extras.cdf_high.append(high)
