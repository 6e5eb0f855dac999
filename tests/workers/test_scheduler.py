"""Who runs next: order of rows, chunked prefill, refill, prompt sharing, memory."""

from __future__ import annotations

import torch

from pipeline.config import SamplingConfig
from workers.kv_cache import KVCache, KVShape
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Request, Sequence
from workers.windows import StepRoom

SHAPE = KVShape(layers=1, heads=1, head_size=1, dtype=torch.float32, device=torch.device("cpu"))
SLOT = 128 * SHAPE.bytes_per_token


def scheduler(
    *, slots: int = 16, max_sequences: int = 8, max_tokens: int = 100, draft_rows: int = 0, max_slots: int = 8
) -> Scheduler:
    return Scheduler(KVCache(SHAPE, slots * SLOT, max_slots), max_sequences, max_tokens, draft_rows)


def samples(length: int, n: int = 1, max_tokens: int = 50) -> list[Sequence]:
    request = Request(f"row-{length}", tuple(range(length)), SamplingConfig(n=n, max_tokens=max_tokens))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


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
    s.waiting.extend([a, b, c])
    assert run(s).chunks == [(a, 60), (b, 30), (c, 10)]
    second = run(s)
    assert second.decoding == [a, b]
    assert second.chunks == [(c, 80)]
    assert second.room == StepRoom(base_rows=82, free_rows=18)


def test_a_slot_is_refilled_in_the_next_step() -> None:
    s = scheduler(max_sequences=2)
    (a,), (b,), (c,) = samples(5), samples(6), samples(7)
    s.waiting.extend([a, b, c])
    run(s)
    assert s.running == [a, b]
    s.retire(a)
    assert run(s).chunks == [(c, 7)]
    assert s.running == [b, c]


def test_never_more_running_than_rows_in_a_step() -> None:
    s = scheduler(max_sequences=8, max_tokens=2)
    s.waiting.extend(sample for length in (3, 4, 5) for sample in samples(length))
    run(s)
    assert len(s.running) == 2


def test_samples_of_a_prompt_wait_for_its_prefill_and_share_it() -> None:
    s = scheduler()
    first, second, third = samples(20, n=3)
    (other,) = samples(9)
    s.waiting.extend([first, second, third, other])
    assert run(s).chunks == [(first, 20), (other, 9)]  # the others of the prompt do not hold up the queue
    schedule = run(s)
    assert schedule.chunks == [(second, 1), (third, 1)]
    assert schedule.decoding == [first, other]


def test_a_waiting_sample_inherits_the_slot_of_one_of_its_prompt() -> None:
    s = scheduler(max_sequences=1)
    first, second = samples(20, n=2)
    (other,) = samples(9)
    s.waiting.extend([first, other, second])
    run(s)
    slot = first.slot
    s.retire(first)
    assert second.slot is slot
    assert run(s).chunks == [(second, 1)]


def test_one_token_prompts_do_not_wait_for_each_other() -> None:
    s = scheduler()
    s.waiting.extend(samples(1, n=3))
    assert len(run(s).chunks) == 3


def test_admission_counts_growth_and_draft_rows() -> None:
    (sample,) = samples(100, max_tokens=20)
    assert scheduler(slots=1).fits(sample)
    s = scheduler(slots=1, draft_rows=8)
    assert s.fits(sample)
    assert not scheduler(slots=1, draft_rows=9).fits(sample)
    s.waiting.extend([sample, *samples(90, max_tokens=5)])
    run(s)
    assert s.running == [sample]


def test_a_sequence_that_must_grow_sends_the_youngest_back_and_it_returns() -> None:
    s = scheduler(slots=3, max_tokens=1000)
    (old,), (young,) = samples(61, max_tokens=150), samples(60, max_tokens=150)
    s.waiting.extend([old, young])
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
    s.waiting.extend([*doomed, other])
    run(s)
    run(s)
    assert set(s.remove("row-20")) == set(doomed)
    assert s.running == [other]
    assert not s.waiting
    assert s.cache.used_bytes == SLOT
