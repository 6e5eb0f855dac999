"""Drafts, proposals and step loads that policy tests share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from workers.drafters.base import Draft, Proposal
from workers.window_policy import StepLoad, StepRoom


def load(
    sequences: int, free_rows: int, *, base_rows: int | None = None, values: Sequence[float] | None = None
) -> StepLoad:
    """Sequences 1, 2, .. that decode with next to nothing in the cache."""
    room = StepRoom(sequences if base_rows is None else base_rows, free_rows)
    return StepLoad(list(range(1, sequences + 1)), [0] * sequences, values or [1.0] * sequences, room)


def chain(scores: tuple[float, ...]) -> Draft:
    n = len(scores)
    return Draft(tuple(range(n)), tuple(range(-1, n - 1)), scores, ("test",) * n)


def proposals(*some: Draft) -> list[Proposal]:
    return [Proposal(draft) for draft in some]


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
