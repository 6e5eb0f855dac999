from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.suffix_index import Match, SuffixIndex, followed


def token_of(match: Match) -> int:
    document, position, _, _ = match
    return document[position]


def test_matches_that_foretold_another_token_are_dropped() -> None:
    index = SuffixIndex()
    index.add(0, [5, 1, 3, 7, 1, 4, 8])
    after = followed(index.matches([1], 1, max_length=16), 3)
    assert [(position, length) for _, position, length, _ in after] == [(3, 2)]


def test_the_longest_context_is_measured_backwards() -> None:
    index = SuffixIndex()
    index.add(0, [5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2])
    matches = index.matches([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 11, max_length=16, own=0)
    assert [(position, length, document[position]) for document, position, length, _ in matches] == [
        (7, 2, 4),
        (3, 3, 3),
    ]


def test_match_length_is_capped() -> None:
    index = SuffixIndex()
    index.add(0, [1, 2, 3, 4, 5, 6])
    (match,) = index.matches([1, 2, 3, 4, 5], 5, max_length=3)
    assert match[2] == 3


def test_shorter_keys_are_tried_last() -> None:
    index = SuffixIndex()
    index.add(0, [1, 2, 3])
    (match,) = index.matches([7, 2], 2, max_length=16)
    assert (token_of(match), match[2]) == (3, 1)
    assert index.matches([7, 3], 2, max_length=16) == []
    assert index.matches([], 0, max_length=16) == []


def test_only_the_committed_prefix_is_looked_up() -> None:
    index = SuffixIndex()
    index.add(0, [1, 2, 3])
    (match,) = index.matches([1, 2, 8, 9], 2, max_length=16)
    assert token_of(match) == 3


def test_own_document_goes_round_at_its_end() -> None:
    """After a b a b the match at a repeats a, b for ever: a loop is drafted as far as rows last."""
    index = SuffixIndex()
    index.add(0, [8, 9, 8, 9])
    match = index.matches([8, 9, 8, 9], 4, max_length=16, own=0)[0]
    tokens = []
    for _ in range(5):
        tokens.append(token_of(match))
        (match,) = followed([match], token_of(match))
    assert tokens == [8, 9, 8, 9, 8]
    assert match[2] == 2 + 5


def test_another_document_ends_at_its_end() -> None:
    index = SuffixIndex()
    index.add(0, [8, 9, 7])
    (match,) = index.matches([8, 9], 2, max_length=16)
    assert token_of(match) == 7
    assert followed([match], 7) == []


def test_a_document_without_its_context_is_found_by_its_own_part_only() -> None:
    index = SuffixIndex()
    index.add(0, [1, 2, 3, 4], first=3)
    assert index.matches([1, 2], 2, max_length=16) == []
    (match,) = index.matches([1, 2, 3], 3, max_length=16)
    assert (token_of(match), match[2]) == (4, 3)


def test_growing_documents_are_indexed_as_they_grow() -> None:
    index = SuffixIndex()
    index.add(0, [1, 2])
    assert index.matches([1, 2], 2, max_length=16) == []
    index.extend(0, [1, 2, 3, 4], 3)
    assert [token_of(match) for match in index.matches([1, 2], 2, max_length=16)] == [3]


def test_the_latest_places_are_kept() -> None:
    index = SuffixIndex(key_lengths=(1,), max_positions=4)
    index.add(0, [token for i in range(50) for token in (7, 100 + i)])
    assert [token_of(match) for match in index.matches([7], 1, max_length=4)] == [149, 148, 147, 146]


def test_memory_is_bounded_and_dropping_leaves_nothing() -> None:
    index = SuffixIndex(max_tokens=100)
    for name in range(50):
        index.add(name, [name, 1, 2, 3, 1000 + name] * 4)
        assert len(index) <= 100
    assert index.num_documents == 5
    assert index.matches([10, 1], 2, max_length=16) != index.matches([49, 1], 2, max_length=16)
    for name in range(45, 50):
        index.drop(name)
    assert (len(index), index.num_documents, index.num_keys) == (0, 0, 0)


def test_one_document_beyond_the_bound_stays_until_the_next_comes() -> None:
    index = SuffixIndex(max_tokens=4)
    index.add(0, [1, 2, 3, 4, 5, 6])
    assert len(index) == 6
    index.add(1, [7, 8])
    assert (len(index), index.num_documents) == (2, 1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 6))
def test_matches_agree_with_a_search_by_brute_force(tokens: list[int], max_length: int) -> None:
    index = SuffixIndex(max_positions=100)
    index.add(0, tokens)
    end = len(tokens)
    found = {(position, length) for _, position, length, _ in index.matches(tokens, end, max_length, own=0)}
    expected = set()
    for position in range(1, end):
        length = 0
        while length < min(max_length, position) and tokens[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        expected.add((position, length))
    for key in (2, 1):
        if key <= max_length and (at_least := {match for match in expected if match[1] >= key}):
            assert found == at_least
            return
    assert {match for match in expected if match[1] > 0} == set()
