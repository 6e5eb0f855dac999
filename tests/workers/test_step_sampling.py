"""From the logits of a step to picks and candidates: who samples how, from which prefix, with which noise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.blocks import decode_block
from workers.drafters.base import Draft, Proposal
from workers.kv_cache import Slot
from workers.planned_block import PlannedBlock
from workers.randomness import streams
from workers.sampling import RowHistory, penalize, pick, widened
from workers.sequence import Request, Sequence
from workers.step_sampling import _histories, pick_rows, record_extras, top_candidates

VOCABULARY = 500
TREE = Draft((7, 8, 9), (-1, 0, 0), (0.5, 0.4, 0.1), ("x", "x", "x"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def planned(uid: str, params: SamplingConfig, output: tuple[int, ...] = (5,), draft: Draft = TREE) -> PlannedBlock:
    sequence = Sequence.create(Request(uid, (1, 2, 3), params), 0, 0, frozenset(), 100)
    sequence.tokens.extend(output)
    slot = Slot(None, 0)  # type: ignore[arg-type]
    block = decode_block(slot, len(sequence.tokens) - 1, output[-1], draft, None)
    return PlannedBlock(sequence, block, Proposal(draft))


def some_logits(rows: int, dtype: torch.dtype) -> Tensor:
    padded_SV = torch.randn(rows, VOCABULARY + 12, generator=torch.Generator().manual_seed(0)) * 3
    return padded_SV.to(dtype)[:, :VOCABULARY]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_is_picked_by_its_own_parameters_prefix_and_position(dtype: torch.dtype) -> None:
    """Against one call of `pick` per row, with the prefix and the index of the token written out by hand."""
    kinds = [
        SamplingConfig(),
        SamplingConfig(temperature=0.0, repetition_penalty=1.7),
        SamplingConfig(top_p=0.8, presence_penalty=2.0, frequency_penalty=0.5),
        SamplingConfig(top_k=20),
        SamplingConfig(),
    ]
    items = [planned(f"row-{i}", params, (5, 5, 6)) for i, params in enumerate(kinds)]
    logits_SV = some_logits(4 * len(items), dtype)
    picked = pick_rows(items, logits_SV).token_R.tolist()
    branches, depths = [(), (7,), (7, 8), (7, 9)], [0, 1, 2, 2]
    for i, (item, params) in enumerate(zip(items, kinds, strict=True)):
        for row, (branch, depth) in enumerate(zip(branches, depths, strict=True)):
            row_1V = widened(logits_SV[4 * i + row][None])
            history = RowHistory(frozenset({1, 2, 3}), Counter((5, 5, 6, *branch)))
            stream = streams([item.sequence.noise], [3 + depth])
            expected = pick(penalize(row_1V, params, [history]), params, stream).token_R
            assert picked[4 * i + row] == int(expected[0]), (i, row)


def test_bounds_only_where_inverse_cdf_asks_for_them() -> None:
    greedy, inverse = SamplingConfig(temperature=0.0), SamplingConfig(coupling="inverse_cdf")
    logits_SV = some_logits(8, torch.float32)
    assert pick_rows([planned("a", greedy), planned("b", greedy)], logits_SV).low_R is None
    for kinds in ((inverse, inverse), (inverse, greedy.model_copy(update={"coupling": "inverse_cdf"}))):
        picks = pick_rows([planned("a", kinds[0]), planned("b", kinds[1])], logits_SV)
        assert picks.low_R is not None
        assert picks.high_R is not None
        assert bool((picks.low_R < picks.high_R).all())
        if kinds[1].temperature == 0.0:
            assert picks.low_R[4:].tolist() == [0.0] * 4
            assert picks.high_R[4:].tolist() == [1.0] * 4


def test_histories_follow_the_branches_of_the_tree() -> None:
    item = planned("a", SamplingConfig(repetition_penalty=1.1), (5, 7))
    histories = _histories(item)
    assert [h.output for h in histories] == [Counter(t) for t in ((5, 7), (5, 7, 7), (5, 7, 7, 8), (5, 7, 7, 9))]
    assert histories == [item.sequence.history(branch) for branch in ((), (7,), (7, 8), (7, 9))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, VOCABULARY + 3])
def test_top_candidates_are_the_best_tokens_at_temperature_one(dtype: torch.dtype, k: int) -> None:
    logits_SV = some_logits(6, dtype)
    ids_SK, probs_SK = top_candidates(logits_SV, k)
    assert ids_SK.dtype == np.int64
    assert probs_SK.dtype == np.float32
    expected_SK = logits_SV.double().softmax(-1).topk(min(k, VOCABULARY)).values.numpy()
    np.testing.assert_allclose(probs_SK, expected_SK, rtol=1e-5)
    gathered_SK = logits_SV.double().softmax(-1).gather(1, torch.from_numpy(ids_SK)).numpy()
    np.testing.assert_allclose(gathered_SK, expected_SK, rtol=1e-12)


def test_extras_are_those_of_the_emitted_rows() -> None:
    params = SamplingConfig(coupling="inverse_cdf", logprobs=2)
    items = [planned("a", params), planned("b", params)]
    logits_SV = some_logits(8, torch.bfloat16)
    picks = pick_rows(items, logits_SV)
    record_extras(
        [(items[0].sequence, [0, 1]), (items[1].sequence, [4])],
        picks,
        logits_SV,
        frozenset({"logprobs", "topk", "cdf"}),
    )
    logp_SV = logits_SV.double().log_softmax(-1)
    extras = items[0].sequence.extras
    assert extras.logprobs == pytest.approx([float(logp_SV[r, picks.token_R[r]]) for r in (0, 1)], abs=1e-5)
    assert extras.topk_logprobs[1] == pytest.approx(logp_SV[1].topk(2).values.tolist(), abs=1e-5)
    assert picks.low_R is not None
    assert picks.high_R is not None
    assert items[1].sequence.extras.cdf_low == [float(picks.low_R[4])]
    assert items[1].sequence.extras.cdf_high == [float(picks.high_R[4])]
