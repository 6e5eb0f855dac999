"""Buying the best nodes of all trees, and what a token is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.drafting import chain, drafts
from workers.drafters.base import Draft
from workers.window_policy import best_nodes, token_values


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


def test_in_the_tail_a_token_is_worth_what_its_sequence_has_to_go() -> None:
    assert token_values([30.0, 10.0]) == pytest.approx([1.5, 0.5])
    assert token_values([]) == []
    assert token_values([0.0]) == [1.0]
