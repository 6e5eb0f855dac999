"""Expected lengths: the limit at first, then what finished samples needed, the nearest ones before all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SamplingConfig
from workers.length_estimate import LengthEstimate, Lengths
from workers.sequence import Request, Sequence


def samples(uid: str, prompt: int = 20, n: int = 1, max_tokens: int = 100) -> list[Sequence]:
    request = Request(uid, (5,) * prompt, SamplingConfig(n=n, max_tokens=max_tokens))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


def finished(estimate: LengthEstimate, sequence: Sequence, length: int) -> None:
    sequence.tokens.extend([7] * length)
    estimate.observe(sequence)


@given(st.lists(st.integers(1, 50), max_size=400), st.integers(0, 50))
def test_lengths_beyond_are_those_of_the_latest(lengths: list[int], emitted: int) -> None:
    group = Lengths()
    for length in lengths:
        group.add(length)
        group.beyond(0)
    above = [length for length in lengths[-256:] if length > emitted]
    assert group.beyond(emitted) == (len(above), sum(above))


def test_the_limit_before_anything_has_finished() -> None:
    (sequence,) = samples("a", max_tokens=64)
    assert LengthEstimate().total(sequence) == 64


def test_finished_samples_pull_the_estimate_to_their_mean() -> None:
    estimate = LengthEstimate()
    (sequence,) = samples("new")
    seen = [estimate.total(sequence)]
    for i in range(60):
        finished(estimate, *samples(f"old{i}"), 10)
        seen.append(estimate.total(sequence))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(10, abs=0.5)


def test_prompts_of_like_length_count_more() -> None:
    estimate = LengthEstimate()
    for i in range(20):
        finished(estimate, *samples(f"short{i}", prompt=20), 5)
        finished(estimate, *samples(f"long{i}", prompt=200), 80)
    (short,), (long,) = samples("s", prompt=25), samples("l", prompt=180)
    assert estimate.total(short) < 20
    assert estimate.total(long) > 65


def test_samples_of_the_same_prompt_count_most_until_the_last_is_done() -> None:
    estimate = LengthEstimate()
    for i in range(20):
        finished(estimate, *samples(f"other{i}"), 80)
    first, second, third = samples("prompt", n=3)
    finished(estimate, first, 4)
    finished(estimate, second, 4)
    assert estimate.knows_prompt(third)
    assert estimate.total(third) < 40
    finished(estimate, third, 4)
    assert not estimate.knows_prompt(third)


def test_a_cancelled_request_is_forgotten() -> None:
    estimate = LengthEstimate()
    first, second = samples("prompt", n=2)
    finished(estimate, first, 4)
    estimate.forget("prompt")
    assert not estimate.knows_prompt(second)


def test_a_running_sample_is_compared_with_longer_ones() -> None:
    estimate = LengthEstimate()
    for i, length in enumerate([10] * 30 + [60] * 30):
        finished(estimate, *samples(f"old{i}"), length)
    (sequence,) = samples("new")
    assert estimate.total(sequence) == pytest.approx(35, abs=3)
    sequence.tokens.extend([7] * 10)
    assert estimate.total(sequence) == pytest.approx(60, abs=3)
    assert estimate.remaining(sequence) == pytest.approx(50, abs=3)
    sequence.tokens.extend([7] * 89)
    assert estimate.remaining(sequence) == 1  # longer than all that finished: the limit stands


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 99))
def test_what_remains_is_between_one_and_the_limit(lengths: list[int], emitted: int) -> None:
    estimate = LengthEstimate()
    for i, length in enumerate(lengths):
        finished(estimate, *samples(f"old{i}"), length)
    (sequence,) = samples("new", max_tokens=100)
    sequence.tokens.extend([7] * emitted)
    assert 1 <= estimate.remaining(sequence) <= sequence.num_remaining
