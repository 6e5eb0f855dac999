"""Keys and values of a model that drafts beside the target, and reads along what is committed.

Shape legend: C contexts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.config import EngineConfig
from workers.blocks import Block, prompt_block
from workers.kv_cache import KVCache, Slot, budget_bytes
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner

_MEMORY_SHARE = 0.1  # of what the target's keys and values may take


class DraftCache:
    """A slot per sample, by its key; `slot.used` columns hold its first tokens."""

    def __init__(self, draft: LoadedModel, runner: ModelRunner, engine: EngineConfig) -> None:
        self._runner = runner
        self._max_context = draft.max_context
        self._vocabulary = draft.model.config.get_text_config().vocab_size
        self._max_rows = engine.max_tokens_per_step
        budget = int(_MEMORY_SHARE * budget_bytes(engine, runner.device))
        self._cache = KVCache(runner.kv_shape, budget, engine.max_sequences)
        self._slots: dict[int, Slot] = {}

    @property
    def used_bytes(self) -> int:
        return self._cache.used_bytes

    def slot(self, key: int, columns: int) -> Slot | None:
        """The sample's slot with room for so many columns; None where the model's context or the memory ends."""
        if columns > self._max_context:
            return None
        slot = self._slots.get(key)
        if slot is None or slot.capacity < columns:
            larger = self._cache.allocate(columns)
            if larger is None:
                return None
            if slot is not None:
                self._cache.copy(slot, larger, slot.used)
                self._cache.free(slot)
            slot = self._slots[key] = larger
        return slot

    def read(self, items: Sequence[tuple[Slot, Sequence[int]]]) -> Tensor:
        """Read the tokens that are not cached, in forwards of bounded size; logits `[C, V]` after the last of each.

        Every item must have at least one.
        """
        logits = [self._runner.forward(blocks) for blocks in self._batches(items, sampled=True)]
        return torch.cat(logits) if logits else torch.empty(0)

    def unread(self, items: Sequence[tuple[Slot, Sequence[int]]]) -> list[Block]:
        """The same tokens as blocks for a forward of the caller's, without logits. What would make that too large, as
        prompts may, is read before.
        """
        *before, last = list(self._batches(items, sampled=False)) or [[]]
        for blocks in before:
            self._runner.forward(blocks)
        return last

    def free(self, key: int) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._cache.free(slot)

    def _batches(self, items: Sequence[tuple[Slot, Sequence[int]]], *, sampled: bool) -> Iterator[list[Block]]:
        """Blocks of the tokens that are not cached, as many together as make a forward of bounded size."""
        batch: list[Block] = []
        for slot, known in items:
            assert slot.used < len(known)
            while slot.used < len(known):
                start, stop = slot.used, min(len(known), slot.used + self._max_rows)
                tokens = tuple(min(token, self._vocabulary - 1) for token in known[start:stop])
                slot.used = stop
                block = prompt_block(slot, start, tokens, sampled=sampled and stop == len(known))
                if batch and sum(b.num_rows for b in batch) + block.num_rows > self._max_rows:
                    yield batch
                    batch = []
                batch.append(block)
        if batch:
            yield batch
