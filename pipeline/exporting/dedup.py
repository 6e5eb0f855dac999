"""Which texts were seen before, in 16 bytes of memory for each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


def digest(*texts: str) -> bytes:
    """16 bytes that stand for texts: two lists of texts share them about never (2^-64 at four billion lists)."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        data = text.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


class SeenDigests:
    """A set of digests as a few sorted arrays, of which two of like length are merged as soon as there are.

    A Python set would take six times the memory.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.bytes_]] = []

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Adds digests; for each whether it is new. Of equal ones in the list the first is."""
        here = np.array(digests, f"S{DIGEST_BYTES}")
        is_new = np.zeros(len(here), bool)
        fresh, first = np.unique(here, return_index=True)
        unseen = np.ones(len(fresh), bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, fresh), len(run) - 1)
            unseen &= run[place] != fresh
        is_new[first[unseen]] = True
        if unseen.any():
            self._runs.append(fresh[unseen])
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]))]
        return [bool(value) for value in is_new]

    def __len__(self) -> int:
        return sum(map(len, self._runs))
