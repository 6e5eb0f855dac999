"""Shared prefixes: what is found, what is kept, and that a slot never gets another prompt's keys and values."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, PromptLookupConfig
from tests.conftest import TINY_MODELS
from workers.engine import Engine, Request, SampleResult
from workers.kv_cache import KVCache
from workers.kv_storage import KVShape
from workers.model_loading import LoadedModel, load_model
from workers.prefix_cache import BLOCK, PrefixCache
from workers.sequence import Sequence

SHAPE = KVShape(layers=2, heads=1, head_size=1, dtype=torch.float64, device=torch.device("cpu"))
SLOT_BYTES = 128 * SHAPE.bytes_per_token


def prompt_samples(tokens: tuple[int, ...], n: int = 1, uid: str = "row") -> list[Sequence]:
    request = Request(uid, tokens, SamplingConfig(n=n, max_tokens=8))
    return [Sequence.create(request, i, i, frozenset(), 10_000) for i in range(n)]


def expected_columns(tokens: list[int]) -> list[float]:
    """A value per column that depends on the whole prefix, as real keys and values do."""
    value, columns = 1.0, []
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
        columns.append(value)
    return columns


class Rig:
    """A prefix cache with a fake model that writes `expected_columns`."""

    def __init__(self, slots: int = 40, *, share_parts: bool = True) -> None:
        self.cache = KVCache(SHAPE, slots * SLOT_BYTES, max_slots=16)
        self.prefixes = PrefixCache(self.cache, share_parts=share_parts)

    def admit(self, sequence: Sequence) -> int | None:
        """Give it a slot and prefill what was not copied; returns the number of copied columns."""
        while (slot := self.cache.allocate(len(sequence.tokens))) is None and self.prefixes.evict():
            pass
        if slot is None:
            return None
        sequence.slot = slot
        self.prefixes.load(sequence)
        copied = slot.used
        self.prefill(sequence, len(sequence.tokens))
        return copied

    def prefill(self, sequence: Sequence, until: int) -> None:
        slot = sequence.slot
        assert slot is not None
        values = expected_columns(sequence.tokens[:until])
        kv = slot.slab.kv_L2SCKD
        kv[:, :, slot.index, slot.used : until, 0, 0] = torch.tensor(values[slot.used :], dtype=torch.float64)
        slot.used = until

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.prefixes.release(sequence, keep=keep)
        assert sequence.slot is not None
        self.cache.free(sequence.slot)
        sequence.slot = None

    def check(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        found = slot.slab.kv_L2SCKD[:, :, slot.index, : slot.used, 0, 0]
        assert (found == torch.tensor(expected_columns(sequence.tokens[: slot.used]), dtype=torch.float64)).all()


HEAD = tuple(range(100, 100 + 3 * BLOCK))


def test_samples_of_a_prompt_share_all_but_its_last_token() -> None:
    rig = Rig()
    first, second = prompt_samples(tuple(range(45)), n=2)
    rig.prefixes.add([first, second])
    assert rig.admit(first) == 0
    assert rig.admit(second) == 44
    rig.check(second)
    assert rig.prefixes.saved_tokens == 44


def test_different_prompts_share_whole_blocks_of_their_common_head() -> None:
    rig = Rig()
    (a,), (b,), (c,) = (prompt_samples(HEAD[: 2 * BLOCK + 5] + own) for own in ((1, 2), (3, 4), (5,)))
    for sequence in (a, b, c):
        rig.prefixes.add([sequence])
    assert [rig.admit(s) for s in (a, b, c)] == [0, 2 * BLOCK, 2 * BLOCK]
    rig.check(c)


def test_a_prompt_that_is_the_head_of_another() -> None:
    rig = Rig()
    (long,), (head,) = prompt_samples((*HEAD, 1, 2)), prompt_samples(HEAD[: 2 * BLOCK + 1])
    rig.prefixes.add([long])
    rig.prefixes.add([head])
    assert (rig.admit(head), rig.admit(long)) == (0, 2 * BLOCK)
    rig.check(long)


def test_without_parts_only_equal_prompts_share() -> None:
    rig = Rig(share_parts=False)
    (a,), (b,), (twin,) = (prompt_samples((*HEAD, own)) for own in (1, 2, 1))
    (longer,) = prompt_samples((*HEAD, 1, 5))
    for sequence in (a, b, twin, longer):
        rig.prefixes.add([sequence])
    # The last token of a prompt is never cached, so a and b come to the same.
    assert [rig.admit(s) for s in (a, longer, b, twin)] == [0, 0, 3 * BLOCK, 3 * BLOCK]
    for sequence in (a, b, twin):
        rig.leave(sequence)
    assert rig.cache.reserved_bytes == 0


def test_only_what_a_second_prompt_asked_for_is_kept() -> None:
    rig = Rig()
    (unique,) = prompt_samples(tuple(range(90)))
    rig.prefixes.add([unique])
    rig.admit(unique)
    rig.leave(unique)
    rig.prefixes.discard(unique)
    assert rig.cache.reserved_bytes == 0
    (a,), (b,), (late,) = (prompt_samples(HEAD + (own,) * 40) for own in (1, 2, 3))
    rig.prefixes.add([a])
    rig.prefixes.add([b])
    for sequence in (a, b):
        rig.admit(sequence)
    rig.leave(a)
    assert rig.cache.reserved_bytes == 0  # b's slot still holds the head
    rig.leave(b)
    assert rig.cache.reserved_bytes == len(HEAD) * SHAPE.bytes_per_token
    for sequence in (a, b):
        rig.prefixes.discard(sequence)
    rig.prefixes.add([late])
    assert rig.admit(late) == len(HEAD)
    rig.check(late)


def test_a_kept_head_is_split_when_a_prompt_leaves_it_midway() -> None:
    rig = Rig()
    twins = [prompt_samples((*HEAD, 1), uid=uid)[0] for uid in "ab"]
    for twin in twins:
        rig.prefixes.add([twin])
    for twin in twins:
        rig.admit(twin)
    for twin in twins:
        rig.leave(twin)
        rig.prefixes.discard(twin)
    (other,) = prompt_samples((*HEAD[:BLOCK], *range(50)))
    rig.prefixes.add([other])
    assert rig.admit(other) == BLOCK
    rig.check(other)
    assert rig.cache.reserved_bytes == len(HEAD) * SHAPE.bytes_per_token
    (again,) = prompt_samples((*HEAD, 1))
    rig.prefixes.add([again])
    assert rig.admit(again) == len(HEAD)
    rig.check(again)


def test_the_end_of_a_kept_path_goes_before_its_beginning() -> None:
    rig = Rig()
    shots = tuple(range(900, 900 + 2 * BLOCK))
    sequences = [prompt_samples((*HEAD, *middle, own))[0] for middle, own in ((shots, 1), (shots, 2), ((7,) * 40, 3))]
    for sequence in sequences:
        rig.prefixes.add([sequence])
    for sequence in sequences:
        rig.admit(sequence)
    for sequence in reversed(sequences):
        rig.leave(sequence)
    (late,) = prompt_samples((*HEAD, *shots, 4))
    rig.prefixes.add([late])
    assert rig.admit(late) == len(HEAD) + len(shots)
    rig.leave(late)
    assert rig.cache.reserved_bytes == 5 * BLOCK * SHAPE.bytes_per_token
    rig.prefixes.evict()
    assert rig.cache.reserved_bytes == 3 * BLOCK * SHAPE.bytes_per_token
    assert rig.admit(late) == len(HEAD)
    rig.check(late)


def test_the_share_of_the_budget_bounds_what_is_kept_and_the_oldest_goes() -> None:
    rig = Rig(slots=4)  # a quarter of it are 128 columns: one head of 96, not two
    heads = [tuple(range(start, start + 96)) for start in (100, 500)]
    for head in heads:
        pair = [prompt_samples((*head, own), uid=f"{own}")[0] for own in (1, 2)]
        for sequence in pair:
            rig.prefixes.add([sequence])
        for sequence in pair:
            rig.admit(sequence)
            rig.leave(sequence)
    assert rig.cache.reserved_bytes == 96 * SHAPE.bytes_per_token
    (again,) = prompt_samples((*heads[1], 9))
    rig.prefixes.add([again])
    assert rig.admit(again) == 96


@pytest.mark.parametrize(
    ("head", "length", "is_worth"), [(64, 100, True), (64, 300, False), (32, 40, False), (49, 50, True)]
)
def test_what_is_worth_waiting_for(head: int, length: int, is_worth: bool) -> None:
    """64 tokens and a quarter of the prompt, or all of it; and only while it is not there yet."""
    rig = Rig()
    (leader,) = prompt_samples((*range(head), 1001, *range(2000, 2100)) if head % BLOCK == 0 else (*range(head), 7))
    (follower,) = prompt_samples((*range(head), *range(5000, 5000 + length - head)))
    for sequence in (leader, follower):
        rig.prefixes.add([sequence])
    assert not rig.prefixes.is_worth_waiting(follower)
    leader.slot = rig.cache.allocate(len(leader.tokens))
    rig.prefixes.load(leader)
    assert rig.prefixes.is_worth_waiting(follower) is is_worth
    rig.prefill(leader, len(leader.tokens))
    assert not rig.prefixes.is_worth_waiting(follower)


class SameHash(int):
    """Tokens that all hash alike."""

    def __hash__(self) -> int:
        return 0


def test_equal_hashes_of_different_tokens_do_no_harm() -> None:
    rig = Rig()
    prompts = [tuple(SameHash(token) for token in (*range(start, start + BLOCK), 1, 2)) for start in (0, 50, 50)]
    sequences = [prompt_samples(prompt)[0] for prompt in prompts]
    for sequence in sequences:
        rig.prefixes.add([sequence])
    assert [rig.admit(sequence) for sequence in sequences] == [0, 0, BLOCK + 1]
    for sequence in sequences:
        rig.check(sequence)


blocks = st.lists(st.sampled_from([(1,) * BLOCK, (2,) * BLOCK, (3,) * BLOCK, (4,) * 7]), max_size=4)
prompts = st.tuples(blocks, st.integers(0, 3)).map(lambda drawn: (*sum(drawn[0], ()), *range(drawn[1]), 9))


class PrefixMachine(RuleBasedStateMachine):
    """Prompts of few different blocks come, are admitted, sent back and finished in a memory of a few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(slots=6)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @rule(prompt=prompts, n=st.integers(1, 2))
    def come(self, prompt: tuple[int, ...], n: int) -> None:
        samples = prompt_samples(prompt, n)
        self.rig.prefixes.add(samples)
        self.waiting += samples

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        at_hand = [s for s in self.running if s.request is sequence.request]
        copied = self.rig.admit(sequence)
        if copied is not None:
            assert copied < len(sequence.tokens)
            assert not at_hand or copied == len(sequence.tokens) - 1
            self.waiting.remove(sequence)
            self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_finished=st.booleans())
    def leave(self, data: st.DataObject, is_finished: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.rig.leave(sequence, keep=is_finished)
        if is_finished:
            self.rig.prefixes.discard(sequence)
        else:
            self.waiting.append(sequence)

    @rule()
    def evict(self) -> None:
        self.rig.prefixes.evict()

    @invariant()
    def everybody_has_its_own_prompt(self) -> None:
        for sequence in self.running:
            self.rig.check(sequence)

    @invariant()
    def the_account_is_right_and_within_the_budget(self) -> None:
        cache, kept = self.rig.cache, self.rig.prefixes._kept
        assert cache.reserved_bytes == sum(part.nbytes for part in cache.storage.parts.values())
        assert cache.reserved_bytes <= cache.budget_bytes // 4
        assert {node.part for node in kept} == set(cache.storage.parts)
        assert cache.free_bytes >= 0
        assert all(node.parent.parent is None or node.parent in kept for node in kept if node.parent is not None)

    def teardown(self) -> None:
        """When all is gone, nothing is left."""
        for sequence in self.running:
            self.rig.leave(sequence, keep=False)
        for sequence in (*self.running, *self.waiting):
            self.rig.prefixes.discard(sequence)
        while self.rig.prefixes.evict():
            pass
        assert not self.rig.prefixes._root.children
        assert not self.rig.cache.reserved_bytes


PrefixMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixes = PrefixMachine.TestCase


def chat_requests() -> list[Request]:
    """A system prompt, two few-shot heads below it, own ends; some prompts are equal, some have several samples."""
    system = tuple(5 + 7 * i % 311 for i in range(80))
    shots = [tuple(5 + (11 + k) * i % 311 for i in range(40)) for k in range(2)]
    requests = []
    for i in range(14):
        prompt = (*system, *shots[i % 2], *range(20 + i // 3, 24 + i)) if i % 5 else (*range(30 + i, 100),)
        sampling = SamplingConfig(n=1 + i % 2, max_tokens=4 + 5 * (i % 4), temperature=0.8, seed=2, ignore_eos=True)
        requests.append(Request(f"row-{i}", prompt, sampling))
    return requests


def outputs(engine: Engine, requests: list[Request]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Two rounds, so that the second one finds what the first one kept."""
    half = len(requests) // 2
    results: list[SampleResult] = engine.generate(requests[:half]) + engine.generate(requests[half:])
    return [(result.uid, result.sample_index, result.token_ids) for result in results]


def outputs_in_turmoil(engine: Engine, requests: list[Request]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Every third step the youngest sequence loses its slot, whatever it is at."""
    for request in requests:
        engine.submit(request)
    results: dict[tuple[str, int], tuple[int, ...]] = {}
    for step in itertools.count():
        if not engine.has_work:
            break
        results |= {(result.uid, result.sample_index): result.token_ids for result in engine.step()}
        if step % 3 == 2 and engine.scheduler.running:
            engine.scheduler._send_back(engine.scheduler.running[-1])
    return [(r.uid, i, results[r.uid, i]) for r in requests for i in range(r.sampling.n)]


@pytest.fixture(scope="module")
def load(tiny_model_dir: Callable[[str], Path]) -> Callable[[str, str], LoadedModel]:
    return lambda name, dtype: load_model(ModelConfig(id=str(tiny_model_dir(name)), dtype=dtype, device="cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_outputs_are_those_without_the_cache(load: Callable[[str, str], LoadedModel], name: str, dtype: str) -> None:
    model = load(name, dtype)
    requests = chat_requests()
    off = Engine(model, EngineConfig(max_sequences=4, prefix_cache=False), AutoConfig())
    expected = outputs(off, requests)
    on = Engine(model, EngineConfig(max_sequences=4), AutoConfig())
    assert outputs(on, requests) == expected
    assert on.scheduler.prefixes.saved_tokens > off.scheduler.prefixes.saved_tokens + 500
    columns = 6 * 256  # six slots: prefixes give way to them
    tiny = EngineConfig(max_sequences=8, kv_memory_gb=columns * on.runner.kv_shape.bytes_per_token / 2**30)
    tight = Engine(model, tiny, PromptLookupConfig())  # as many drafts on any machine, and so the same events
    events: Counter[str] = Counter()
    count_calls(tight.scheduler.prefixes, "_keep", events)
    count_calls(tight.scheduler.prefixes, "evict", events)
    assert outputs_in_turmoil(tight, requests[:7]) + outputs_in_turmoil(tight, requests[7:]) == expected
    assert min(events["_keep"], events["evict"]) > 0, events


def count_calls(owner: Any, name: str, events: Counter[str]) -> None:
    """Counts the calls of a method that return something else than False."""
    original = getattr(owner, name)

    def counted(*args: Any) -> Any:
        result = original(*args)
        events[name] += result is not False
        return result

    # The classes without slots let an instance have a method of its own.
    setattr(owner, name, counted)
