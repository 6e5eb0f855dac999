from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.growth import Bucket, Candidate, grade, grow

Claims = dict[tuple[int, ...], list[tuple[int, float]]]


class Table:
    """Candidates by path; the state is the path itself."""

    def __init__(self, claims: Claims, bucket: Bucket | None = None) -> None:
        self.claims = claims
        self.bucket = bucket or Bucket("toy")

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        return [Candidate(token, claimed, self.bucket) for token, claimed in self.claims.get(state, [])]

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)


TREE: Claims = {(): [(1, 0.6), (2, 0.3)], (1,): [(3, 0.9), (4, 0.1)], (2,): [(5, 1.0)], (1, 3): [(6, 0.5)]}


def test_growth_is_best_first() -> None:
    draft = grow(Table(TREE), (), max_rows=5, min_score=0.1)
    assert draft.tokens == (1, 3, 2, 5, 6)  # .6, .54, .3, .3, .27; node 4 scores .06
    assert draft.parents == (-1, 0, -1, 2, 1)
    assert draft.scores == pytest.approx((0.6, 0.54, 0.3, 0.3, 0.27))
    assert set(draft.drafters) == {"toy"}


def test_growth_stops_at_rows_and_at_worthless_nodes() -> None:
    assert grow(Table(TREE), (), max_rows=2, min_score=0.1).tokens == (1, 3)
    assert grow(Table(TREE), (), max_rows=0, min_score=0.1).tokens == ()
    assert grow(Table(TREE), (), max_rows=9, min_score=0.4).tokens == (1, 3)
    assert grow(Table({}), (), max_rows=9, min_score=0.4).tokens == ()


def test_bucket_learns_how_far_claims_come_true() -> None:
    bucket = Bucket("toy")
    assert Candidate(0, 0.5, bucket).probability == 0.5
    for i in range(40):
        bucket.record(0.5, hit=i < 8)
    assert Candidate(0, 0.5, bucket).probability == pytest.approx(0.25)  # the worked example of its docstring


def test_probability_never_exceeds_one() -> None:
    bucket = Bucket("toy")
    for _ in range(100):
        bucket.record(0.5, hit=True)
    assert Candidate(0, 0.9, bucket).probability == 1.0


def test_bucket_forgets() -> None:
    bucket = Bucket("toy")
    for _ in range(5000):
        bucket.record(1.0, hit=True)
    for _ in range(5000):
        bucket.record(1.0, hit=False)
    assert bucket.scale < 0.05


def test_grading_follows_what_was_emitted() -> None:
    bucket = Bucket("toy")
    grade(Table(TREE, bucket), (), (1, 4))
    assert bucket.hits == 2
    assert bucket.expected == pytest.approx(0.6 + 0.3 + 0.9 + 0.1)


claims = st.dictionaries(
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=4, unique_by=lambda claim: claim[0]),
    max_size=20,
)


@settings(deadline=None)
@given(claims, st.integers(0, 12), st.sampled_from([0.0, 0.01, 0.3]))
def test_every_tree_is_sound(table: Claims, max_rows: int, min_score: float) -> None:
    draft = grow(Table(table), (), max_rows, min_score)
    assert len(draft) <= max_rows
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    for score, parent in zip(draft.scores, draft.parents, strict=True):
        assert min_score <= score <= (draft.scores[parent] if parent >= 0 else 1.0)
    assert list(draft.scores) == sorted(draft.scores, reverse=True)
    assert _best_scores(table, min_score)[: len(draft)] == pytest.approx(draft.scores)


def _best_scores(table: Claims, min_score: float) -> Sequence[float]:
    """All paths of the table by exhaustive search, best first."""
    scores: list[float] = []
    frontier: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while frontier:
        path, score = frontier.pop()
        for token, claimed in table.get(path, []):
            if score * claimed >= min_score:
                scores.append(score * claimed)
                frontier.append(((*path, token), score * claimed))
    return sorted(scores, reverse=True)
