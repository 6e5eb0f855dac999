"""The order of admission: sent back, longest expected, arrival; and nobody is overtaken for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import SamplingConfig
from workers.length_estimate import LengthEstimate
from workers.sequence import Request, Sequence
from workers.waiting_queue import WaitingQueue


def samples(uid: str, prompt: int = 20, n: int = 1, max_tokens: int = 100) -> list[Sequence]:
    request = Request(uid, (5,) * prompt, SamplingConfig(n=n, max_tokens=max_tokens))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


def queue(max_overtaken: int = 1000) -> WaitingQueue:
    return WaitingQueue(LengthEstimate(), max_overtaken)


def order(waiting: WaitingQueue) -> list[str]:
    return [sequence.request.uid for sequence in waiting.candidates()]


def finish(waiting: WaitingQueue, sequence: Sequence, length: int) -> None:
    sequence.tokens.extend([7] * length)
    waiting.observe(sequence)


def test_equals_keep_the_order_of_arrival_whatever_their_prompts() -> None:
    waiting = queue()
    for uid, prompt in [("a", 200), ("b", 5), ("c", 200), ("d", 50)]:
        waiting.extend(samples(uid, prompt))
    assert order(waiting) == ["a", "b", "c", "d"]


def test_the_longest_limit_first_before_anything_has_finished() -> None:
    waiting = queue()
    for uid, limit in [("a", 10), ("b", 100), ("c", 99), ("d", 500)]:
        waiting.extend(samples(uid, max_tokens=limit))
    assert order(waiting) == ["d", "b", "c", "a"]


def test_prompts_like_those_with_long_outputs_go_first() -> None:
    waiting = queue()
    for i in range(20):
        finish(waiting, *samples(f"short{i}", prompt=20), 5)
        finish(waiting, *samples(f"long{i}", prompt=200), 80)
    for uid, prompt in [("a", 20), ("b", 200), ("c", 20), ("d", 200)]:
        waiting.extend(samples(uid, prompt))
    assert order(waiting) == ["b", "d", "a", "c"]


def test_a_finished_sample_moves_the_others_of_its_prompt() -> None:
    waiting = queue()
    for i in range(20):
        finish(waiting, *samples(f"old{i}"), 50)
    first, *rest = samples("chatty", n=4)
    waiting.extend(samples("a"))
    waiting.extend(rest)
    waiting.extend(samples("b"))
    assert order(waiting) == ["a", "chatty", "chatty", "chatty", "b"]
    finish(waiting, first, 100)
    assert order(waiting) == ["chatty", "chatty", "chatty", "a", "b"]
    waiting.admit(rest[0])
    finish(waiting, rest[0], 2)
    finish(waiting, samples("old", n=1)[0], 50)
    assert [s for s in waiting if s.request.uid == "chatty"] == rest[1:]


def test_a_sample_that_was_sent_back_goes_first_and_is_no_heir() -> None:
    waiting = queue()
    one, two = samples("a", n=2)
    waiting.extend(samples("b", max_tokens=900))
    waiting.extend([one, two])
    waiting.admit(one)
    waiting.put_back(one)
    assert order(waiting) == ["a", "b", "a"]
    assert next(waiting.candidates()) is one
    assert waiting.sibling(one) is two
    waiting.admit(one)
    assert len(waiting) == 2


def test_removal_and_length() -> None:
    waiting = queue()
    doomed = samples("a", n=3)
    waiting.extend(doomed)
    waiting.extend(samples("b"))
    for sequence in doomed:
        waiting.remove(sequence)
    assert (len(waiting), order(waiting), waiting.sibling(doomed[0])) == (1, ["b"], None)
    assert bool(waiting)


def test_an_heir_must_not_overtake_for_ever() -> None:
    waiting = queue(max_overtaken=2)
    waiting.extend(samples("first"))
    many = samples("many", n=9)
    waiting.extend(many[1:])
    for _ in range(2):
        heir = waiting.sibling(many[0])
        assert heir is not None
        waiting.admit(heir)
    assert waiting.sibling(many[0]) is None
    assert order(waiting)[0] == "first"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3)), min_size=1, max_size=80), st.integers(0, 6))
def test_overtaking_is_bounded_for_every_arrival_pattern(arrivals: list[tuple[int, int]], bound: int) -> None:
    """Each arrival (limit, number of admissions after it); then the queue drains. Exhaustive count as reference."""
    waiting = queue(max_overtaken=bound)
    number: dict[Sequence, int] = {}
    admitted: list[Sequence] = []

    def admit() -> None:
        sequence = next(waiting.candidates())
        waiting.admit(sequence)
        admitted.append(sequence)

    for i, (limit, count) in enumerate(arrivals):
        (sequence,) = samples(f"row-{i}", max_tokens=limit)
        number[sequence] = i
        waiting.extend([sequence])
        for _ in range(min(count, len(waiting))):
            admit()
    while waiting:
        admit()
    assert sorted(map(number.__getitem__, admitted)) == list(range(len(arrivals)))
    for at, sequence in enumerate(admitted):
        assert sum(number[other] > number[sequence] for other in admitted[:at]) <= max(bound, 0)
