"""Who runs in the next step: admission within the KV budget, chunked prefill, refill of slots, sharing of prompts.

Order of a step's rows: first the pending token of every decoding sequence, then prompt chunks, and what is left of
`max_tokens_per_step` may go to drafts. No sequence is admitted that could not be served alone, and a sequence that
cannot grow sends the youngest one back to the queue, so the engine never deadlocks on memory. Being sent back costs
time, never tokens: the noise of a sample does not depend on when it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from workers.kv_cache import KVCache
from workers.sequence import Sequence
from workers.windows import StepRoom

_GROWTH_ROOM = 64
"""New tokens that a slot has room for when a sequence is admitted."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: sequences that decode, (sequence, rows) of prompt chunks, and the room for drafts."""

    decoding: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    room: StepRoom


class Scheduler:
    """Owns the waiting and the running sequences and their slots. `draft_rows` is the most rows a sequence's block
    adds.
    """

    def __init__(self, cache: KVCache, max_sequences: int, max_tokens_per_step: int, draft_rows: int) -> None:
        self.cache = cache
        self.max_running = min(max_sequences, max_tokens_per_step)
        self.max_tokens_per_step = max_tokens_per_step
        self.draft_rows = draft_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence can be served at its full length with nothing else running."""
        return self.cache.fits_alone(sequence.max_length + self.draft_rows)

    def schedule(self) -> Schedule:
        for sequence in list(self.running):
            if sequence.is_decoding:  # one that was sent back for an older one is not
                self._make_room(sequence)
        self._admit()
        decoding = [s for s in self.running if s.is_decoding]
        budget = self.max_tokens_per_step - len(decoding)
        chunks = []
        for sequence in self.running:
            if not sequence.is_decoding and budget > 0:
                rows = min(sequence.num_uncached, budget)
                chunks.append((sequence, rows))
                budget -= rows
        return Schedule(decoding, chunks, StepRoom(self.max_tokens_per_step - budget, budget))

    def retire(self, sequence: Sequence) -> None:
        """A sample ended: its slot goes to a waiting sample of the same prompt (which needs no prefill), or is
        freed.
        """
        self.running.remove(sequence)
        slot, sequence.slot = sequence.slot, None
        assert slot is not None
        heir = next((s for s in self.waiting if self._shares_prompt(s, sequence) and not s.started), None)
        if heir is not None and len(self.running) < self.max_running:
            self.waiting.remove(heir)
            slot.used = heir.context.prompt_length - 1
            heir.slot = slot
            self.running.append(heir)
        else:
            self.cache.free(slot)

    def remove(self, uid: str) -> list[Sequence]:
        """Drop all samples of a request, waiting or running; returns them."""
        removed = [s for s in (*self.waiting, *self.running) if s.request.uid == uid]
        self.waiting = deque(s for s in self.waiting if s.request.uid != uid)
        self.running = [s for s in self.running if s.request.uid != uid]
        for sequence in removed:
            self._release(sequence)
        return removed

    def _admit(self) -> None:
        for sequence in self._admissible():
            if len(self.running) >= self.max_running:
                return
            slot = self.cache.allocate(self._initial_columns(sequence))
            if slot is None:
                return
            self.waiting.remove(sequence)
            sequence.slot = slot
            source = self._prompt_source(sequence)
            if source is not None and source.slot is not None:
                self.cache.copy(source.slot, slot, sequence.context.prompt_length - 1)
            self.running.append(sequence)

    def _admissible(self) -> Iterator[Sequence]:
        """Waiting sequences in order, without those whose prompt another sample is just being prefilled with."""
        for sequence in list(self.waiting):
            shares = not sequence.started and sequence.context.prompt_length > 1
            mates = shares and any(self._shares_prompt(s, sequence) for s in self.running)
            if not mates or self._prompt_source(sequence) is not None:
                yield sequence

    def _prompt_source(self, sequence: Sequence) -> Sequence | None:
        """A running sample of the same prompt whose cache holds all of the prompt but its last token."""
        if sequence.started:  # sent back while decoding: its own tokens must be prefilled anyway
            return None
        needed = sequence.context.prompt_length - 1
        for mate in self.running:
            if self._shares_prompt(mate, sequence) and mate.num_cached >= needed > 0:
                return mate
        return None

    @staticmethod
    def _shares_prompt(a: Sequence, b: Sequence) -> bool:
        return a is not b and a.request is b.request

    def _initial_columns(self, sequence: Sequence) -> int:
        ahead = min(sequence.num_remaining, _GROWTH_ROOM)
        return len(sequence.tokens) + ahead + self.draft_rows

    def _make_room(self, sequence: Sequence) -> None:
        """See to it that the next block fits into the slot: move to a larger slab, at the youngest one's cost if
        need be.
        """
        assert sequence.slot is not None
        needed = len(sequence.tokens) + self.draft_rows
        while sequence.slot.capacity < needed:
            larger = self.cache.allocate(self._initial_columns(sequence))
            if larger is not None:
                old = sequence.slot
                self.cache.copy(old, larger, old.used)
                sequence.slot = larger
                self.cache.free(old)
                return
            youngest = self.running[-1]
            self._send_back(youngest)
            if youngest is sequence:
                return

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.cache.free(sequence.slot)
            sequence.slot = None
