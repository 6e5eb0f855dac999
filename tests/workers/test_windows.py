"""Window policies: growth and shrinkage, shares of a full batch, buying the best nodes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import AutoConfig, SuffixConfig
from workers.drafters.base import EMPTY_DRAFT, Draft
from workers.windows import AdaptiveWindow, RowCap, StepRoom, best_nodes, build_policy

CPU = torch.device("cpu")


def room(free_rows: int) -> StepRoom:
    """A step with no idle rows."""
    return StepRoom(base_rows=100, free_rows=free_rows)


def chain(scores: tuple[float, ...]) -> Draft:
    n = len(scores)
    return Draft(tuple(range(n)), tuple(range(-1, n - 1)), scores, ("test",) * n)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    parents: list[int] = []
    scores: list[float] = []
    for i in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, i - 1))
        above = 1.0 if parent < 0 else scores[parent]
        parents.append(parent)
        scores.append(above * draw(st.sampled_from([1.0, 0.9, 0.5])))
    return Draft(tuple(range(len(parents))), tuple(parents), tuple(scores), ("test",) * len(parents))


def test_best_nodes_of_the_worked_example() -> None:
    first, second = best_nodes([chain((0.8, 0.5, 0.2)), chain((0.6,))], 3)
    assert (len(first), len(second)) == (2, 1)


@given(st.lists(drafts(), max_size=5), st.integers(0, 20))
def test_best_nodes_keeps_trees_and_the_best_scores(some: list[Draft], rows: int) -> None:
    kept = best_nodes(some, rows)
    assert sum(map(len, kept)) == min(rows, sum(map(len, some)))
    everything = sorted((score for draft in some for score in draft.scores), reverse=True)
    assert sorted((score for draft in kept for score in draft.scores), reverse=True) == everything[:rows]
    for before, after in zip(some, kept, strict=True):
        paths = {before.tokens[i]: before.parents[i] for i in range(len(before))}
        for token, parent in zip(after.tokens, after.parents, strict=True):
            assert (after.tokens[parent] if parent >= 0 else -1) == paths[token]  # tokens are node numbers here


def test_window_grows_on_whole_drafts_shrinks_on_early_breaks_and_stays_in_between() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=2, max_window=12), CPU)
    assert policy.windows([1], room(100)) == [7]
    policy.observe(1, chain((0.5,) * 4), 2)
    assert policy.windows([1], room(100)) == [7]
    policy.observe(1, chain((0.5,) * 4), 4)
    assert policy.windows([1], room(100)) == [12]  # 7 * 1.5 + 1, at most 12
    for _ in range(20):
        policy.observe(1, chain((0.5,) * 4), 0)
    assert policy.windows([1], room(100)) == [2]
    policy.observe(1, EMPTY_DRAFT, 0)
    assert policy.windows([1, 2], room(100)) == [2, 7]


def test_a_window_keeps_its_share_of_idle_rows() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=1, max_window=12), CPU)
    for key in (1, 2, 3):
        for _ in range(20):
            policy.observe(key, chain((0.5,) * 4), 0)
    assert policy.windows([1], StepRoom(base_rows=1, free_rows=100)) == [12]
    assert policy.windows([1, 2, 3], StepRoom(base_rows=3, free_rows=100)) == [4, 4, 4]
    assert policy.windows([1, 2, 3], StepRoom(base_rows=16, free_rows=100)) == [1, 1, 1]


def test_a_finished_sequence_is_forgotten() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=2, max_window=12), CPU)
    policy.observe(1, chain((0.5,)), 0)
    policy.finish(1)
    assert policy.windows([1], room(100)) == [7]


def test_a_full_batch_shares_the_rows() -> None:
    policy = AdaptiveWindow(SuffixConfig(min_window=4, max_window=4, max_draft_rows=64), CPU)
    assert policy.windows([1, 2, 3], room(6)) == [2, 2, 2]
    assert policy.windows([1, 2, 3], room(2)) == [0, 0, 0]
    assert policy.windows(list(range(32)), room(1000)) == [2] * 32


def test_row_cap_buys_the_best_of_all_sequences() -> None:
    policy = RowCap(AutoConfig(max_window=8, idle_rows=5), CPU)
    small = StepRoom(base_rows=2, free_rows=100)
    assert policy.windows([1, 2], small) == [3, 3]
    kept = policy.select([chain((0.9, 0.8, 0.7)), chain((0.1, 0.05))], small)
    assert [len(draft) for draft in kept] == [3, 0]


def test_a_full_batch_or_a_prompt_chunk_leaves_no_rows() -> None:
    policy = RowCap(AutoConfig(), CPU)
    assert policy.windows([1], StepRoom(base_rows=1, free_rows=1000)) == [15]
    assert policy.windows([1], StepRoom(base_rows=200, free_rows=800)) == [0]
    keys = list(range(16))
    assert policy.windows(keys, StepRoom(base_rows=16, free_rows=1000)) == [0] * 16
    assert policy.select([chain((0.9,))], StepRoom(base_rows=16, free_rows=1000)) == [EMPTY_DRAFT]


def test_auto_gets_the_row_cap_all_others_their_own_windows() -> None:
    assert isinstance(build_policy(AutoConfig(), CPU), RowCap)
    assert isinstance(build_policy(SuffixConfig(), CPU), AdaptiveWindow)
