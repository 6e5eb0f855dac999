"""What the samples of one prompt share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerGroup(Generic[T]):
    """One value for each group of samples, made when the first one enters and dropped when the last one leaves."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[str, T] = {}
        self._members: Counter[str] = Counter()

    def __getitem__(self, group: str) -> T:
        return self._values[group]

    def __len__(self) -> int:
        return len(self._values)

    def enter(self, group: str) -> bool:
        """Count one more sample; True for the first one of its group."""
        self._members[group] += 1
        if self._members[group] > 1:
            return False
        self._values[group] = self._make()
        return True

    def leave(self, group: str) -> None:
        self._members[group] -= 1
        if self._members[group] == 0:
            del self._members[group], self._values[group]
