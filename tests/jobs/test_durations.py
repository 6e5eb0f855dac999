"""Durations in words."""

from __future__ import annotations

import pytest

from jobs.durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.85, "850 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (245.0, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11220.0, "3 h 07 min"),
        (3.6e6, "1,000 h 00 min"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
