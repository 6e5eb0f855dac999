from __future__ import annotations

import pytest

from workers.drafters.ngram_pool import NgramPool


def test_continuations_come_latest_first() -> None:
    pool = NgramPool(ngram=3, candidates=4)
    for ngram in [(1, 2, 3), (1, 4, 5), (9, 1, 1)]:
        pool.add(ngram)
    assert pool.continuations(1) == [(4, 5), (2, 3)]
    assert pool.continuations(9) == [(1, 1)]
    assert pool.continuations(2) == []


def test_the_longest_unused_continuation_is_dropped() -> None:
    pool = NgramPool(ngram=3, candidates=2)
    for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.continuations(1) == [(6, 7), (2, 3)]


def test_text_enters_with_every_ngram() -> None:
    pool = NgramPool(ngram=3, candidates=2)
    pool.add_text([1, 2, 3, 1, 4])
    assert pool.continuations(1) == [(2, 3)]
    assert pool.continuations(2) == [(3, 1)]
    assert pool.continuations(3) == [(1, 4)]
    pool.add_text([1, 2])
    assert pool.continuations(1) == [(2, 3)]


def test_ngrams_of_another_length_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        NgramPool(ngram=3, candidates=2).add((1, 2))
