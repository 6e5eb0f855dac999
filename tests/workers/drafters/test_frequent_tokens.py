from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.frequent_tokens import FrequentTokens


def test_relative_frequencies_of_the_top() -> None:
    frequent = FrequentTokens(top_k=2)
    assert frequent.probabilities == {}
    frequent.add([7, 8, 9, 7, 8, 7, 5, 5])
    assert frequent.probabilities == pytest.approx({7: 3 / (8 + 32), 8: 2 / (8 + 32)})


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
def test_the_top_is_the_top(tokens: list[int], top_k: int) -> None:
    frequent = FrequentTokens(top_k)
    frequent.add(tokens)
    counts = [count for _, count in Counter(tokens).most_common(top_k)]
    assert list(frequent.probabilities.values()) == pytest.approx([count / (len(tokens) + 32) for count in counts])
