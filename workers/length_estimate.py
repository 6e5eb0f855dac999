"""How many tokens a sample will come to, learned from those that have finished.

Three groups of finished samples know something: all of them, those with a prompt of about the same length, and those of
the same prompt. The wider group's estimate counts as some observations of the narrower one (shrinkage), and the job's
limit as one observation of the widest, so that the estimate is the limit before anything has finished and a lone
observation does not decide. A sample that has emitted e tokens is compared with those that came to more than e.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

from workers.sequence import Sequence

_MEMORY = 256
"""Finished samples that a group remembers, the latest ones."""
_ALL_WEIGHT, _BUCKET_WEIGHT, _PROMPT_WEIGHT = 1, 4, 1
"""How many observations the wider estimate counts for: the limit, all samples, those of like prompts."""


class Lengths:
    """Output lengths of the latest finished samples of a group."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None

    def add(self, length: int) -> None:
        if len(self._latest) == _MEMORY:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(length)
        insort(self._sorted, length)
        self._sums = None

    def beyond(self, emitted: int) -> tuple[int, int]:
        """Number and sum of the lengths above `emitted`. Worked example, lengths 3, 5, 9: beyond(3) is (2, 14)."""
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        first = bisect_right(self._sorted, emitted)
        return len(self._sorted) - first, self._sums[-1] - self._sums[first]


class LengthEstimate:
    """Expected output lengths, in tokens."""

    def __init__(self) -> None:
        self._all = Lengths()
        self._buckets: dict[int, Lengths] = {}
        self._prompts: dict[str, tuple[Lengths, int]] = {}

    def observe(self, sequence: Sequence) -> None:
        """A sample has finished."""
        length, request = _num_emitted(sequence), sequence.request
        self._all.add(length)
        self._buckets.setdefault(bucket(sequence), Lengths()).add(length)
        if request.sampling.n > 1:
            lengths, finished = self._prompts.pop(request.uid, (Lengths(), 0))
            lengths.add(length)
            if finished + 1 < request.sampling.n:
                self._prompts[request.uid] = (lengths, finished + 1)

    def forget(self, uid: str) -> None:
        """A request was cancelled."""
        self._prompts.pop(uid, None)

    def knows_prompt(self, sequence: Sequence) -> bool:
        """Whether another sample of the prompt has finished."""
        return sequence.request.uid in self._prompts

    def total(self, sequence: Sequence) -> float:
        """Expected output length, between one more than was emitted and the most that may be."""
        emitted = _num_emitted(sequence)
        limit = emitted + sequence.num_remaining
        groups = [(self._all, _ALL_WEIGHT)]
        if (alike := self._buckets.get(bucket(sequence))) is not None:
            groups.append((alike, _BUCKET_WEIGHT))
        if (siblings := self._prompts.get(sequence.request.uid)) is not None:
            groups.append((siblings[0], _PROMPT_WEIGHT))
        expected = float(limit)
        for lengths, weight in groups:
            count, total = lengths.beyond(emitted)
            expected = (total + weight * expected) / (count + weight)
        return min(expected, limit)

    def remaining(self, sequence: Sequence) -> float:
        """Expected number of tokens that the sample will still emit."""
        return self.total(sequence) - _num_emitted(sequence)


def bucket(sequence: Sequence) -> int:
    """Prompts of about the same length: the number of bits of it."""
    return sequence.context.prompt_length.bit_length()


def _num_emitted(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.context.prompt_length
