"""Who runs in the next step: admission within the KV budget, chunked prefill, refill of slots, sharing of prompts.

Order of a step's rows: first the pending token of every decoding sequence, then prompt chunks, and what is left of
`max_tokens_per_step` may go to drafts. Prompt chunks are bounded by that alone: offline, a delayed token costs nothing.
No sequence is admitted that could not be served alone, and a sequence that cannot grow sends the youngest one back to
the queue, so the engine never deadlocks on memory. Being sent back costs time, never tokens: the noise of a sample does
not depend on when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.kv_cache import KVCache, Slot
from workers.length_estimate import LengthEstimate
from workers.prefix_cache import PrefixCache
from workers.sequence import Sequence
from workers.waiting_queue import WaitingQueue
from workers.window_policy import StepRoom

_GROWTH_ROOM = 64
"""New tokens that a slot has room for when a sequence is admitted."""
_OVERTAKEN_BATCHES = 4
"""Batches of later samples that may be admitted before one that waits: few against a shard, so that shards end in turn
and the driver sends the next one while there is still a queue."""
_LOOKED_AT_BATCHES = 4
"""Batches of samples that an admission looks at in vain, so that a step does not walk a queue of thousands."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: sequences that decode, (sequence, rows) of prompt chunks, the room for drafts, and how many samples
    still wait.
    """

    decoding: list[Sequence]
    chunks: list[tuple[Sequence, int]]
    room: StepRoom
    num_waiting: int


class Scheduler:
    """Owns the waiting and the running sequences and their slots. `draft_rows` is the most rows a sequence's block
    adds.
    """

    def __init__(
        self,
        cache: KVCache,
        max_sequences: int,
        max_tokens_per_step: int,
        draft_rows: int,
        *,
        prefix_cache: bool = True,
    ) -> None:
        self.cache = cache
        self.max_running = min(max_sequences, max_tokens_per_step)
        self.max_tokens_per_step = max_tokens_per_step
        self.draft_rows = draft_rows
        self.prefixes = PrefixCache(cache, share_parts=prefix_cache)
        self.lengths = LengthEstimate()
        self.waiting = WaitingQueue(self.lengths, _OVERTAKEN_BATCHES * self.max_running)
        self.running: list[Sequence] = []
        self.num_sent_back = 0

    @property
    def foremost(self) -> Sequence | None:
        """The sample that was admitted first of those that run, or the one that is next where none does."""
        return self.running[0] if self.running else next(self.waiting.candidates(), None)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence can be served at its full length with nothing else running."""
        return self.cache.fits_alone(sequence.max_length + self.draft_rows)

    def submit(self, samples: Seq[Sequence]) -> None:
        """Queue all samples of one request."""
        self.prefixes.add(samples)
        self.waiting.extend(samples)

    def expected_remaining(self, sequence: Sequence) -> float:
        """Tokens that a sequence will still emit, as far as finished ones tell; at most what it may."""
        return self.lengths.remaining(sequence)

    def schedule(self) -> Schedule:
        for sequence in list(self.running):
            if sequence.is_decoding:  # one that was sent back for an older one is not
                self._make_room(sequence)
        self._admit()
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        budget = self.max_tokens_per_step - len(decoding)
        chunks = []
        for sequence in prefilling:
            if budget > 0:
                rows = min(sequence.num_uncached, budget)
                chunks.append((sequence, rows))
                budget -= rows
        return Schedule(decoding, chunks, StepRoom(self.max_tokens_per_step - budget, budget), len(self.waiting))

    def retire(self, sequence: Sequence) -> None:
        """A sample ended: its slot goes to a waiting sample of the same request (which needs no prefill), or is
        freed.
        """
        self.waiting.observe(sequence)
        self.running.remove(sequence)
        assert sequence.slot is not None
        heir = self.waiting.sibling(sequence) if len(self.running) < self.max_running else None
        if heir is None:
            self.prefixes.release(sequence, keep=True)
            self._free(sequence)
        else:
            self.waiting.admit(heir)
            heir.slot, sequence.slot = sequence.slot, None
            heir.slot.used = heir.context.prompt_length - 1
            self.prefixes.hold(heir)
            self.prefixes.release(sequence, keep=False)
            self.running.append(heir)
        self.prefixes.discard(sequence)

    def remove(self, uid: str) -> list[Sequence]:
        """Drop all samples of a request, waiting or running; returns them."""
        removed = [s for s in (*self.waiting, *self.running) if s.request.uid == uid]
        for sequence in removed:
            if sequence.slot is None:
                self.waiting.remove(sequence)
            else:
                self.running.remove(sequence)
                self.prefixes.release(sequence, keep=False)
                self._free(sequence)
            self.prefixes.discard(sequence)
        self.lengths.forget(uid)
        return removed

    def _admit(self) -> None:
        """Fill free places. A sample that can soon copy its prompt from one that is being prefilled lets others go
        first.
        """
        places, looks = self.max_running - len(self.running), _LOOKED_AT_BATCHES * self.max_running
        admitted: list[Sequence] = []
        candidates = self.waiting.candidates() if places > 0 else iter(())
        for sequence in candidates:
            if not sequence.started and self.prefixes.is_worth_waiting(sequence):
                looks -= 1
            else:
                sequence.slot = self._allocate(self._initial_columns(sequence))
                if sequence.slot is None:
                    break
                self.prefixes.load(sequence)
                self.running.append(sequence)
                admitted.append(sequence)
            if len(admitted) == places or looks == 0:
                break
        for sequence in admitted:
            self.waiting.admit(sequence)

    def _initial_columns(self, sequence: Sequence) -> int:
        ahead = min(sequence.num_remaining, _GROWTH_ROOM)
        return len(sequence.tokens) + ahead + self.draft_rows

    def _allocate(self, columns: int) -> Slot | None:
        """A slot, at the cost of kept prefixes if need be; None when running sequences have taken all."""
        while (slot := self.cache.allocate(columns)) is None and self.prefixes.evict():
            pass
        return slot

    def _make_room(self, sequence: Sequence) -> None:
        """See to it that the next block fits into the slot: move to a larger slab, at the youngest one's cost if
        need be.
        """
        assert sequence.slot is not None
        needed = len(sequence.tokens) + self.draft_rows
        while sequence.slot.capacity < needed:
            larger = self._allocate(self._initial_columns(sequence))
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
        self.num_sent_back += 1
        self.running.remove(sequence)
        self.prefixes.release(sequence, keep=False)
        self._free(sequence)
        self.waiting.put_back(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cache.free(sequence.slot)
        sequence.slot = None
