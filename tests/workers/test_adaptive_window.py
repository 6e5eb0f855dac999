"""Windows of named strategies: growth and shrinkage, shares of a full batch and of idle rows."""

from __future__ import annotations

import torch

from pipeline.decoding_config import SuffixConfig
from tests.workers.drafting import chain, load, proposals
from workers.adaptive_window import AdaptiveWindow
from workers.drafters.base import EMPTY_DRAFT
from workers.window_policy import StepLoad

CPU = torch.device("cpu")


def busy(sequences: int, free_rows: int) -> StepLoad:
    """A step with no idle rows."""
    return load(sequences, free_rows, base_rows=100)


def test_window_grows_on_whole_drafts_shrinks_on_early_breaks_and_stays_in_between() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=2, max_window=12), CPU)
    assert policy.windows(busy(1, 100)).rows == [7]
    policy.observe(1, chain((0.5,) * 4), 2)
    assert policy.windows(busy(1, 100)).rows == [7]
    policy.observe(1, chain((0.5,) * 4), 4)
    assert policy.windows(busy(1, 100)).rows == [12]  # 7 * 1.5 + 1, at most 12
    for _ in range(20):
        policy.observe(1, chain((0.5,) * 4), 0)
    assert policy.windows(busy(1, 100)).rows == [2]
    policy.observe(1, EMPTY_DRAFT, 0)
    assert policy.windows(busy(2, 100)).rows == [2, 7]


def test_a_window_keeps_its_share_of_idle_rows() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=1, max_window=12), CPU)
    for key in (1, 2, 3):
        for _ in range(20):
            policy.observe(key, chain((0.5,) * 4), 0)
    assert policy.windows(load(1, 100)).rows == [7]
    assert policy.windows(load(3, 100)).rows == [1, 1, 1]
    assert policy.windows(load(3, 100, base_rows=16)).rows == [1, 1, 1]


def test_a_finished_sequence_is_forgotten() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=2, max_window=12), CPU)
    policy.observe(1, chain((0.5,)), 0)
    policy.finish(1)
    assert policy.windows(busy(1, 100)).rows == [7]


def test_a_full_batch_shares_the_rows() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=4, max_window=4, max_draft_rows=64), CPU)
    assert policy.windows(busy(3, 6)).rows == [2, 2, 2]
    assert policy.windows(busy(3, 2)).rows == [0, 0, 0]
    assert policy.windows(busy(32, 1000)).rows == [2] * 32


def test_the_best_nodes_that_fit_are_taken() -> None:
    policy = AdaptiveWindow(SuffixConfig(), CPU)
    kept = policy.select(proposals(chain((0.9, 0.8, 0.7)), chain((0.1, 0.05))), busy(2, 3))
    assert [len(proposal.draft) for proposal in kept] == [3, 0]
