"""A bounded table from short contexts to the model's latest candidates after them."""

from __future__ import annotations

Context = tuple[int, ...]
Candidates = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and their probabilities, best first."""


class ContinuationTable:
    """`context -> candidates`, the least recently stored contexts dropped.

    Contexts of different lengths are different keys. Candidates are shared, not copied, so a row that is stored under
    keys of several lengths takes its memory once.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, capacity
        self._capacity = capacity
        self._rows: dict[Context, Candidates] = {}  # in the order of storing

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, context: Context) -> bool:
        return context in self._rows

    def get(self, context: Context) -> Candidates | None:
        return self._rows.get(context)

    def store(self, context: Context, candidates: Candidates) -> None:
        """Overwrite what is known after a context."""
        rows = self._rows
        if rows.pop(context, None) is None and len(rows) >= self._capacity:
            del rows[next(iter(rows))]
        rows[context] = candidates

    def store_all(self, context: Context, candidates: Candidates) -> None:
        """The same for a context and all that it ends with."""
        for start in range(len(context)):
            self.store(context[start:], candidates)
