"""Who runs next: order of rows, chunked prefill, refill, prompt sharing, memory."""

from __future__ import annotations

import itertools

import torch

from pipeline.config import SamplingConfig
from workers.kv_cache import KVCache
from workers.kv_storage import KVShape
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Request, Sequence
from workers.window_policy import StepRoom

SHAPE = KVShape(layers=1, heads=1, head_size=1, dtype=torch.float32, device=torch.device("cpu"))
SLOT = 128 * SHAPE.bytes_per_token


def scheduler(
    *, slots: int = 16, max_sequences: int = 8, max_tokens: int = 100, draft_rows: int = 0, max_slots: int = 8
) -> Scheduler:
    return Scheduler(KVCache(SHAPE, slots * SLOT, max_slots), max_sequences, max_tokens, draft_rows)


def samples(length: int, n: int = 1, max_tokens: int = 50) -> list[Sequence]:
    """A prompt of its own for each length."""
    prompt = tuple(range(1000 * length, 1001 * length))
    request = Request(f"row-{length}", prompt, SamplingConfig(n=n, max_tokens=max_tokens))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


def submit(s: Scheduler, *sequences: Sequence) -> None:
    for _, group in itertools.groupby(sequences, key=lambda sequence: id(sequence.request)):
        s.submit(list(group))


def run(s: Scheduler) -> Schedule:
    """A step that emits token 7 for every sequence that comes to its end of the prompt or decodes."""
    schedule = s.schedule()
    for sequence, rows in schedule.chunks:
        assert sequence.slot is not None
        sequence.slot.used += rows
        if sequence.slot.used == len(sequence.tokens):
            sequence.started = True
            sequence.tokens.append(7)
    for sequence in schedule.decoding:
        assert sequence.slot is not None
        sequence.slot.used += 1
        sequence.tokens.append(7)
    return schedule


def test_prompts_are_packed_and_chunked_behind_decoding() -> None:
    s = scheduler(max_tokens=100)
    (a,), (b,), (c,) = samples(60), samples(30), samples(90)
    submit(s, a, b, c)
    assert run(s).chunks == [(a, 60), (b, 30), (c, 10)]
    second = run(s)
    assert second.decoding == [a, b]
    assert second.chunks == [(c, 80)]
    assert second.room == StepRoom(base_rows=82, free_rows=18)


def test_a_slot_is_refilled_in_the_next_step() -> None:
    s = scheduler(max_sequences=2)
    (a,), (b,), (c,) = samples(5), samples(6), samples(7)
    submit(s, a, b, c)
    run(s)
    assert s.running == [a, b]
    s.retire(a)
    assert run(s).chunks == [(c, 7)]
    assert s.running == [b, c]


def test_never_more_running_than_rows_in_a_step() -> None:
    s = scheduler(max_sequences=8, max_tokens=2)
    submit(s, *(sample for length in (3, 4, 5) for sample in samples(length)))
    run(s)
    assert len(s.running) == 2


def test_samples_of_a_prompt_wait_for_its_prefill_and_share_it() -> None:
    s = scheduler()
    first, second, third = samples(20, n=3)
    (other,) = samples(9)
    submit(s, first, second, third, other)
    assert run(s).chunks == [(first, 20), (other, 9)]  # the others of the prompt do not hold up the queue
    schedule = run(s)
    assert schedule.chunks == [(second, 1), (third, 1)]
    assert schedule.decoding == [first, other]


def test_a_waiting_sample_inherits_the_slot_of_one_of_its_prompt() -> None:
    s = scheduler(max_sequences=1)
    first, second = samples(20, n=2)
    (other,) = samples(9)
    submit(s, first, other, second)
    run(s)
    slot = first.slot
    s.retire(first)
    assert second.slot is slot
    assert run(s).chunks == [(second, 1)]


def test_an_heir_lends_its_prompt_in_turn() -> None:
    s = scheduler(max_sequences=2)
    first, second, third = samples(20, n=3)
    (other,) = samples(9)
    submit(s, first, other, second, third)
    run(s)
    s.retire(first)
    assert s.running == [other, second]
    run(s)
    s.running.remove(other)  # its slot is for a sample that must copy
    assert run(s).chunks == [(third, 1)]


def test_one_token_prompts_do_not_wait_for_each_other() -> None:
    s = scheduler()
    submit(s, *samples(1, n=3))
    assert len(run(s).chunks) == 3


def test_admission_counts_growth_and_draft_rows() -> None:
    (sample,) = samples(100, max_tokens=20)
    assert scheduler(slots=1).fits(sample)
    s = scheduler(slots=1, draft_rows=8)
    assert s.fits(sample)
    assert not scheduler(slots=1, draft_rows=9).fits(sample)
    submit(s, sample, *samples(90, max_tokens=5))
    run(s)
    assert s.running == [sample]


def test_a_sequence_that_must_grow_sends_the_youngest_back_and_it_returns() -> None:
    s = scheduler(slots=3, max_tokens=1000)
    (old,), (young,) = samples(61, max_tokens=150), samples(60, max_tokens=150)
    submit(s, old, young)
    while young in s.running or not old.started:
        run(s)
    assert list(s.waiting) == [young]
    assert young.slot is None
    assert old.slot is not None
    assert old.slot.capacity == 256
    s.retire(old)
    emitted = len(young.tokens)
    assert run(s).chunks == [(young, emitted)]  # prompt and output are prefilled again, none is emitted twice
    assert len(young.tokens) == emitted + 1


def test_remove_frees_waiting_and_running_samples() -> None:
    s = scheduler(max_sequences=2)
    doomed = samples(20, n=3)
    (other,) = samples(9)
    submit(s, *doomed, other)
    run(s)
    run(s)
    assert set(s.remove("row-20")) == set(doomed)
    assert s.running == [other]
    assert not s.waiting
    assert s.cache.used_bytes == SLOT


def shared_head(name: str, head: int, own: int, n: int = 1) -> list[Sequence]:
    """A prompt of `head` tokens that others have too, then `own` ones."""
    start = 10_000 * int(name)
    prompt = (*range(head), *range(start, start + own))
    request = Request(f"row-{name}", prompt, SamplingConfig(n=n, max_tokens=20))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


def test_prompts_with_a_common_head_wait_for_its_first_prefill() -> None:
    s = scheduler(slots=40, max_tokens=1000)
    (a,), (b,), (c,) = (shared_head(name, 70, 20) for name in "123")
    (other,) = samples(9)
    submit(s, a, b, c, other)
    assert run(s).chunks == [(other, 9), (a, 90)]  # the longest limit first
    second = run(s)
    assert second.decoding == [other, a]
    assert second.chunks == [(b, 26), (c, 26)]  # two whole blocks of the head were copied
    assert s.prefixes.saved_tokens == 2 * 64


def test_a_short_common_head_is_not_waited_for_but_used_once_it_is_there() -> None:
    s = scheduler(slots=40, max_sequences=2, max_tokens=1000)
    (a,), (b,), (c,) = (shared_head(name, 40, 20) for name in "123")
    submit(s, a, b, c)
    assert run(s).chunks == [(a, 60), (b, 60)]
    s.retire(a)
    assert run(s).chunks == [(c, 60 - 40)]


def test_without_the_prefix_cache_only_equal_prompts_share() -> None:
    s = Scheduler(KVCache(SHAPE, 40 * SLOT, 8), 8, 1000, 0, prefix_cache=False)
    (a,), (b,), (twin,) = (shared_head(name, 70, 20) for name in "121")
    submit(s, a, b, twin)
    assert run(s).chunks == [(a, 90), (b, 90)]
    assert run(s).chunks == [(twin, 1)]


def test_a_kept_head_outlives_its_prompts_and_gives_way_to_slots() -> None:
    s = scheduler(slots=8, max_sequences=2, max_tokens=1000)
    (a,), (b,), (late,) = (shared_head(name, 70, 20) for name in "123")
    submit(s, a, b)
    run(s)
    run(s)
    s.retire(a)
    s.retire(b)
    assert s.cache.reserved_bytes == 64 * SHAPE.bytes_per_token
    submit(s, late)
    assert run(s).chunks == [(late, 26)]
    s.retire(late)
    (large,) = samples(900, max_tokens=20)  # needs the whole memory
    submit(s, large)
    assert run(s).chunks == [(large, 900)]
    assert s.cache.reserved_bytes == 0


def test_a_sequence_that_was_sent_back_copies_its_prompt_again() -> None:
    s = scheduler(slots=8, max_tokens=1000)
    a, b = shared_head("1", 90, 5), shared_head("2", 90, 8)
    submit(s, *a, *b)
    run(s)
    run(s)
    run(s)
    emitted = len(b[0].tokens)
    s._send_back(b[0])
    schedule = run(s)
    assert schedule.chunks == [(b[0], emitted - 88)]
    assert len(b[0].tokens) == emitted + 1


def test_the_longest_expected_goes_first_and_tells_how_much_is_left() -> None:
    s = scheduler(max_sequences=1, max_tokens=1000)
    (short,), (long,) = samples(5, max_tokens=10), samples(6, max_tokens=50)
    submit(s, short, long)
    schedule = run(s)
    assert (s.running, schedule.num_waiting) == ([long], 1)
    assert s.expected_remaining(long) == 49  # one of 50 is out, and nothing has finished yet
    s.retire(long)
    assert run(s).num_waiting == 0
    assert s.running == [short]


def test_a_full_batch_does_not_look_at_the_queue() -> None:
    s = scheduler(max_sequences=1)
    submit(s, *samples(5), *samples(6))
    run(s)
    s.waiting.candidates = lambda: (_ for _ in ()).throw(AssertionError("looked"))  # type: ignore[method-assign]
    run(s)
