"""Which split a prompt belongs to: told by a hash of its id alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def split_of(uid: str, splits: Sequence[tuple[str, float]]) -> str:
    """The split of a row's id: the same in every export, whatever is filtered or added, and one for all its samples."""
    place = int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "big") / 2**64
    for name, share in splits:
        place -= share
        if place < 0:
            return name
    return splits[-1][0]
