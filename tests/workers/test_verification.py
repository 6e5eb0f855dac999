"""The accepted path through a draft tree, against plain decoding of a toy model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.drafters.base import EMPTY_DRAFT, Draft
from workers.verification import accepted_path


def make_draft(tokens: tuple[int, ...], parents: tuple[int, ...]) -> Draft:
    return Draft(tokens, parents, (0.5,) * len(tokens), ("test",) * len(tokens))


A_TREE = make_draft((11, 12, 13), (-1, 0, 0))
"""b, c, d below the pending token: b -> c and b -> d."""


def test_worked_example() -> None:
    picks = [11, 13, 99, 14]
    path = accepted_path(A_TREE, picks)
    assert path == (0, 1, 3)
    assert [picks[row] for row in path] == [11, 13, 14]


def test_nothing_accepted() -> None:
    assert accepted_path(A_TREE, [12, 13, 0, 0]) == (0,)


def test_a_right_token_below_a_wrong_parent_is_not_accepted() -> None:
    assert accepted_path(make_draft((5, 7), (-1, 0)), [7, 8, 9]) == (0,)


def test_no_draft() -> None:
    assert accepted_path(EMPTY_DRAFT, [3]) == (0,)


def test_full_chain_and_bonus() -> None:
    assert accepted_path(make_draft((1, 2, 3), (-1, 0, 1)), [1, 2, 3, 4]) == (0, 1, 2, 3)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(-1, i - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
        else:
            return make_draft(tuple(tokens), tuple(parents))
    return make_draft(tuple(tokens), tuple(parents))


def toy_model(prefix: tuple[int, ...]) -> int:
    return hash(prefix) % 3


@given(trees())
def test_emits_what_plain_decoding_emits_and_as_much_as_the_tree_allows(draft: Draft) -> None:
    prefixes: list[tuple[int, ...]] = [(0,)]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        prefixes.append((*prefixes[parent + 1], token))
    picks = [toy_model(prefix) for prefix in prefixes]
    emitted = [picks[row] for row in accepted_path(draft, picks)]
    plain: tuple[int, ...] = (0,)
    for token in emitted:
        assert token == toy_model(plain)
        plain = (*plain, token)
    assert plain not in prefixes  # else that row's pick could have been emitted too
    assert plain[:-1] in prefixes
