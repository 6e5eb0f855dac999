from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.quality import REPEATS, SHORTEST_LOOP, QualityWatch, ends_in_loop
from pipeline.records import AcceptanceStats, PartReceipt
from tests.pipeline.makers import make_receipt

VERSE = "Row, row, row your boat, gently down the stream, merrily, merrily, life is but a dream. "


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("", False),
        ("well, " + "no, " * 40, True),
        ("=" * 100, False),
        ("=" * 120, True),
        (VERSE * 3, False),
        (VERSE * 4, True),
        (VERSE * 4 + "The end.", False),
        ("".join(f"{i}. item\n" for i in range(100)), False),
    ],
)
def test_ends_in_loop(text: str, loops: bool) -> None:
    assert ends_in_loop(text) == loops


@given(st.text(max_size=40), st.text(min_size=1, max_size=160))
def test_a_piece_that_is_repeated_often_is_a_loop(before: str, piece: str) -> None:
    times = max(REPEATS, -(-SHORTEST_LOOP // len(piece)))
    assert ends_in_loop(before + piece * times)


def _receipt(index: int, rows: int = 32, tokens: int = 320, accepted: int = 100, **changes: int) -> PartReceipt:
    steps = tokens - accepted
    histogram = (steps - accepted, accepted)
    stats = AcceptanceStats(steps, 2 * steps, accepted, histogram, (0, 0, steps), {"suffix": accepted})
    fields = {"num_rows": rows, "num_failed": 0, "errors": {}, "completion_tokens": tokens, "stats": stats}
    return make_receipt(index, **{**fields, **changes})


def test_a_job_like_any_other_gives_no_warning() -> None:
    watch = QualityWatch()
    for index in range(40):
        assert watch.observe(_receipt(index, tokens=320 + index % 7, accepted=100 + index % 5)) == []


def test_a_shard_that_is_unlike_the_others() -> None:
    watch = QualityWatch()
    for index in range(8):
        assert watch.observe(_receipt(index)) == []
    assert watch.observe(_receipt(8, tokens=1600, accepted=700)) == [
        "shard 8 is unlike the others: 50 tokens a sample, others 10",
        "shard 8 is unlike the others: 1.78 tokens a step, others 1.45",
    ]
    assert watch.observe(_receipt(9)) == []


def test_shares_are_told_once_and_again_when_they_double() -> None:
    watch = QualityWatch()
    assert watch.observe(_receipt(0, num_looping=32)) == []  # too few rows to tell
    assert watch.observe(_receipt(1)) == ["32 of 64 outputs end in a loop (the same piece over and over)"]
    assert watch.observe(_receipt(2, num_cut_off=32)) == []
    assert watch.observe(_receipt(3, num_cut_off=32, num_looping=32)) == []
    assert watch.observe(_receipt(4, num_cut_off=32)) == ["96 of 160 outputs were cut off at sampling.max_tokens"]


def test_failed_rows_do_not_count() -> None:
    watch = QualityWatch()
    assert watch.observe(_receipt(0, rows=64, num_failed=64, tokens=0, accepted=0, num_looping=0)) == []
    assert watch.observe(_receipt(1, rows=63, num_cut_off=63)) == []


def test_samples_that_go_on_after_their_end_are_always_cut_off() -> None:
    watch = QualityWatch(expects_ends=False)
    assert [watch.observe(_receipt(index, num_cut_off=32)) for index in range(3)] == [[], [], []]
