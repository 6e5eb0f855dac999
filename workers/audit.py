"""Telling a near-tie from a bug: how close was the choice between two tokens?

In bf16 the logits of a row change in their last bits with the shape of the batch that it is in, so a pick can flip
where two tokens are nearly tied. A flip that is not a near-tie is a mismatch, and a bug.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.blocks import prompt_block
from workers.kv_cache import KVCache
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner
from workers.noise_sets import distances_from_middle
from workers.randomness import NoiseKey, key_of_set, noise_key, streams
from workers.sampling import penalize, pick_by_tensors, scores, widened
from workers.sequence import Request
from workers.sequence import Sequence as Sample

_ROUNDINGS = 16
"""Roundings of the largest logit that the layers of a forward may add up to."""


def is_near_tie(
    loaded: LoadedModel, request: Request, sample_index: int, prefix: Sequence[int], stored_token: int
) -> bool:
    """Whether rounding alone can explain `stored_token` after the output tokens `prefix`.

    True iff its `margin` is below what 16 roundings of the largest logit come to in the model's precision, for a set of
    noise that rounding may have chosen.
    """
    logits_1V = _logits(loaded, request, prefix)
    limit = _limit(loaded, logits_1V)
    return any(
        margin(logits_1V, request.sampling, streams([key], [len(prefix)]), stored_token) < limit
        for key in _possible_keys(loaded, request, sample_index, prefix)
    )


def margin(logits_1V: Tensor, sampling: SamplingConfig, stream_1: Tensor, stored_token: int) -> float:
    """By how much the picked token beats `stored_token`, in units of logits (of probability for inverse-CDF coupling).

    A token that top-k, top-p or min-p just dropped is judged with these limits a little wider, since rounding moves
    tokens across them too; infinite if it is dropped even so.
    """
    wider = sampling.model_copy(
        update={
            "top_k": sampling.top_k + 1 if sampling.top_k else 0,
            "top_p": min(1.0, sampling.top_p + 0.02),
            "min_p": sampling.min_p * 0.9,
        }
    )
    gaps = []
    for params in (sampling, wider):
        score_V = scores(logits_1V, params, stream_1)
        gaps.append(float(score_V.max() - score_V[stored_token]))
    return min(gaps)


def _logits(loaded: LoadedModel, request: Request, prefix: Sequence[int]) -> Tensor:
    """(Penalised) logits `[1, V]` after prompt and prefix, from one causal forward."""
    runner = ModelRunner(loaded.model)
    tokens = (*request.prompt_ids, *prefix)
    slot = KVCache(runner.kv_shape, 2**62, max_slots=1).allocate(len(tokens))
    assert slot is not None
    logits_1V = widened(runner.forward([prompt_block(slot, 0, tokens, sampled=True)]))
    if not request.sampling.has_penalties:
        return logits_1V
    sample = Sample.create(request, 0, 0, loaded.eos_token_ids, loaded.max_context)
    return penalize(logits_1V, request.sampling, [sample.history(prefix)])


def _limit(loaded: LoadedModel, logits_1V: Tensor) -> float:
    return _ROUNDINGS * torch.finfo(loaded.model.dtype).eps * float(logits_1V.abs().max())


def _possible_keys(
    loaded: LoadedModel, request: Request, sample_index: int, prefix: Sequence[int]
) -> Sequence[NoiseKey]:
    """Keys of the noise that may have picked the token after `prefix`: of several sets, the one whose place is nearest
    the middle where the stretch began, and those that rounding may have put before it.
    """
    sampling = request.sampling
    key = noise_key(sampling.seed, request.uid, sample_index)
    if not sampling.chooses_noise:
        return [key]
    began = len(prefix) - len(prefix) % sampling.noise_stretch
    logits_1V = _logits(loaded, request, prefix[:began])
    keys = [key_of_set(key, index) for index in range(sampling.noise_sets)]
    stream_M = streams(keys, [began] * len(keys))
    picks = pick_by_tensors(logits_1V.expand(len(keys), -1), sampling, stream_M)
    distance_M, width_M = distances_from_middle(picks, stream_M)
    is_possible_M = distance_M - distance_M.min() < 2 * _limit(loaded, logits_1V) / width_M
    return [key for key, is_possible in zip(keys, is_possible_M.tolist(), strict=True) if is_possible]
