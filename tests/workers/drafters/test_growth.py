from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.base import Draft, DraftContext
from workers.drafters.growth import Bucket, Claim, Grower, Place
from workers.drafters.growth import grade as grade_from
from workers.drafters.growth import grow as grow_from

Claims = dict[tuple[int, ...], list[tuple[int, float]]]


class Table:
    """Candidates by path; the state is the path itself."""

    def __init__(self, table: Claims, bucket: Bucket | None = None) -> None:
        self.table = table
        self.looked_up: list[tuple[int, ...]] = []
        self.bucket = bucket or Bucket("toy")

    def root(self, context: DraftContext, end: int) -> tuple[int, ...]:
        return tuple(context.tokens[context.prompt_length : end])

    def claims(self, state: tuple[int, ...], least: float) -> list[Claim]:
        self.looked_up.append(state)
        return [(token, claimed, self.bucket) for token, claimed in self.table.get(state, []) if claimed > least]

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)


def grow(table: Table, max_rows: int, min_score: float) -> Draft:
    return grow_from(table, Place(table, ()), max_rows, min_score)


TREE: Claims = {(): [(1, 0.6), (2, 0.3)], (1,): [(3, 0.9), (4, 0.1)], (2,): [(5, 1.0)], (1, 3): [(6, 0.5)]}


def test_growth_is_best_first() -> None:
    draft = grow(Table(TREE), max_rows=5, min_score=0.1)
    assert draft.tokens == (1, 3, 2, 5, 6)  # .6, .54, .3, .3, .27; node 4 scores .06
    assert draft.parents == (-1, 0, -1, 2, 1)
    assert draft.scores == pytest.approx((0.6, 0.54, 0.3, 0.3, 0.27))
    assert set(draft.drafters) == {"toy"}


def test_growth_stops_at_rows_and_at_worthless_nodes() -> None:
    assert grow(Table(TREE), max_rows=2, min_score=0.1).tokens == (1, 3)
    assert grow(Table(TREE), max_rows=0, min_score=0.1).tokens == ()
    assert grow(Table(TREE), max_rows=9, min_score=0.4).tokens == (1, 3)
    assert grow(Table({}), max_rows=9, min_score=0.4).tokens == ()


def test_bucket_learns_how_far_claims_come_true() -> None:
    bucket = Bucket("toy")
    assert bucket.scale == 1.0
    for i in range(38):
        bucket.record(0.5, hit=i < 9)
    assert bucket.scale == pytest.approx(0.5)  # the worked example of its docstring


def test_probability_never_exceeds_one() -> None:
    bucket = Bucket("toy")
    for _ in range(100):
        bucket.record(0.5, hit=True)
    assert bucket.scale > 1.5
    assert grow(Table({(): [(0, 0.9)]}, bucket), 1, 0.0).scores == (1.0,)


def test_bucket_forgets() -> None:
    bucket = Bucket("toy")
    for _ in range(5000):
        bucket.record(1.0, hit=True)
    for _ in range(5000):
        bucket.record(1.0, hit=False)
    assert bucket.scale < 0.05


def test_grading_follows_what_was_emitted() -> None:
    bucket = Bucket("toy")
    table = Table(TREE, bucket)
    grade_from(table, Place(table, ()), (1, 4))
    assert bucket.hits == 2
    assert bucket.expected == pytest.approx(0.6 + 0.3 + 0.9 + 0.1)


def test_a_graded_step_looks_nothing_up_again_along_its_path() -> None:
    table = Table(TREE)
    grower = Grower(table)
    context = DraftContext(0, "g", [7], 1)
    (proposal,) = grower.propose([context], [5], 0.1)
    assert proposal.draft.tokens == (1, 3, 2, 5, 6)
    assert table.looked_up == [(), (1,), (1, 3), (2,), (2, 5)]  # not what would follow the last node
    context.tokens += [1, 3]
    assert grower.grade(context, (1, 3)) == ()
    assert len(table.looked_up) == 5
    assert table.bucket.hits == 2


def test_steps_that_went_by_unobserved_are_not_graded() -> None:
    table = Table(TREE)
    grower = Grower(table)
    context = DraftContext(0, "g", [7], 1)
    grower.propose([context], [5], 0.1)
    context.tokens += [1, 3, 6]
    assert grower.grade(context, (6,)) == (1, 3)
    assert (table.bucket.hits, table.bucket.expected) == (1, pytest.approx(0.5))
    context.tokens += [9]
    grower.grade(context, (9,))  # without a proposal
    assert table.looked_up[-1] == (1, 3, 6)


def test_claims_that_would_not_do_are_neither_looked_at_nor_graded() -> None:
    """A least score of 0.4 looks at claims of more than 0.2, in case that their scale is above 1."""
    table = Table({(): [(1, 0.6), (2, 0.3), (3, 0.1)], (1,): [(4, 0.5), (5, 0.15)]})
    grower = Grower(table)
    context = DraftContext(0, "g", [7], 1)
    assert grower.propose([context], [1], 0.4)[0].draft.tokens == (1,)
    context.tokens += [1, 4]
    grower.grade(context, (1, 4))
    assert (table.bucket.hits, table.bucket.expected) == (2, pytest.approx(0.6 + 0.3 + 0.5))


def test_no_rows_no_look() -> None:
    table = Table(TREE)
    assert len(Grower(table).propose([DraftContext(0, "g", [7], 1)], [0], 0.0)[0].draft) == 0
    assert table.looked_up == []


claims = st.dictionaries(
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=4, unique_by=lambda claim: claim[0]),
    max_size=20,
)


@settings(deadline=None)
@given(claims, st.integers(0, 12), st.sampled_from([0.0, 0.01, 0.3]))
def test_every_tree_is_sound(table: Claims, max_rows: int, min_score: float) -> None:
    draft = grow(Table(table), max_rows, min_score)
    assert len(draft) <= max_rows
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    for score, parent in zip(draft.scores, draft.parents, strict=True):
        assert min_score <= score <= (draft.scores[parent] if parent >= 0 else 1.0)
    assert list(draft.scores) == sorted(draft.scores, reverse=True)
    best = [score for score in _best_scores(table, max(min_score, 0.01)) if score > 0.02][:max_rows]
    assert list(draft.scores[: len(best)]) == pytest.approx(best)


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
