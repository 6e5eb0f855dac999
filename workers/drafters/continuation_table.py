"""A bounded table from short contexts to the model's latest candidates after them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Context = tuple[int, ...]


class ContinuationTable:
    """`context -> (tokens, probabilities)` of `top_k` candidates each, the least recently stored contexts dropped.

    Rows live in two arrays of [capacity, top_k] (8 bytes a candidate); contexts of different lengths are different
    keys.
    """

    def __init__(self, top_k: int, capacity: int) -> None:
        assert top_k > 0 < capacity, (top_k, capacity)
        self._capacity = capacity
        self._slots: OrderedDict[Context, int] = OrderedDict()
        self._tokens_SK = np.zeros((capacity, top_k), np.int32)
        self._probs_SK = np.zeros((capacity, top_k), np.float32)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, context: Context) -> bool:
        return context in self._slots

    def store(
        self, contexts: Sequence[Context], tokens_RK: npt.NDArray[np.int64], probs_RK: npt.NDArray[np.float32]
    ) -> None:
        """Overwrite what is known after `contexts[r]` by row r; of equal contexts the last row stays."""
        slots = [self._slot(context) for context in contexts]
        self._tokens_SK[slots] = tokens_RK
        self._probs_SK[slots] = probs_RK

    def get(self, context: Context) -> tuple[list[int], list[float]] | None:
        slot = self._slots.get(context)
        if slot is None:
            return None
        return self._tokens_SK[slot].tolist(), self._probs_SK[slot].tolist()

    def _slot(self, context: Context) -> int:
        slot = self._slots.get(context)
        if slot is not None:
            self._slots.move_to_end(context)
            return slot
        slot = len(self._slots) if len(self._slots) < self._capacity else self._slots.popitem(last=False)[1]
        self._slots[context] = slot
        return slot
