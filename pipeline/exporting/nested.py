"""The top k of tokens as numpy sees them: they are too many numbers for Python's own lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TopK:
    """A column list<list<number>> with k numbers for each token: `counts` are the tokens of each row."""

    counts: NDArray[np.int64]
    values_TK: NDArray[Any]

    @property
    def k(self) -> int:
        return int(self.values_TK.shape[1])

    def last_repeated(self, times: int) -> TopK:
        """With the last token of each row so many times more.

        Worked example: rows [[a]] and [[b], [c]] with the last repeated once are [[a], [a]] and [[b], [c], [c]].
        """
        repeats = np.ones(len(self.values_TK), np.int64)
        repeats[np.cumsum(self.counts) - 1] += times
        return TopK(self.counts + times, np.repeat(self.values_TK, repeats, axis=0))

    def to_arrow(self) -> pa.ListArray:
        tokens = pa.ListArray.from_arrays(
            offsets(np.full(len(self.values_TK), self.k)), pa.array(self.values_TK.ravel())
        )
        return pa.ListArray.from_arrays(offsets(self.counts), tokens)


def top_k(column: pa.ChunkedArray) -> TopK:
    rows = column.combine_chunks()
    tokens = rows.flatten()
    counts, lengths = _lengths(rows), _lengths(tokens)
    k = int(lengths[0]) if len(lengths) else 1
    assert (lengths == k).all(), "k differs between tokens"
    return TopK(counts, tokens.flatten().to_numpy(zero_copy_only=False).reshape(-1, k))


def neutral(k: int, like: NDArray[Any]) -> NDArray[Any]:
    """Log-probabilities for a place without a teacher, which no loss counts: uniform, and finite, as 0 * inf is NaN."""
    return np.full(k, -np.log(k), like.dtype)


def offsets(lengths: NDArray[Any]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _lengths(lists: pa.ListArray) -> NDArray[np.int64]:
    assert lists.null_count == 0, "a row without the lists"
    lengths: NDArray[np.int64] = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths
