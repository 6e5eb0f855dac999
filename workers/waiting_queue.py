"""Samples that wait for a slot, the longest expected first.

A few long samples that start late are the tail of a job, in which most of the machine idles; started early they run
beside the others (longest processing time first, Graham 1969). Samples that were sent back go before all others, and
equals keep the order in which they came. Expectations are compared in steps of a quarter octave, so that noise in the
estimates does not shuffle shards. A sample is overtaken by a limited number of later ones.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from workers.length_estimate import LengthEstimate, bucket
from workers.sequence import Sequence

_Arrivals = OrderedDict[Sequence, int]
"""Samples in the order of their arrival, with its number."""
_Class = tuple[int, int] | int


class WaitingQueue:
    """Waiting samples. After `max_overtaken` later arrivals were admitted before a sample, the queue goes by arrival
    until it is in; so at most that many and one batch overtake it.

    Samples of one expectation form a class, in order of arrival, so that an admission looks at a few classes and not at
    all that wait. A class is (bits of the prompt's length, bits of the limit), or the identity of a request of which
    samples have finished.
    """

    def __init__(self, lengths: LengthEstimate, max_overtaken: int) -> None:
        self.max_overtaken = max_overtaken
        self._lengths = lengths
        self._returned: deque[Sequence] = deque()
        self._arrived: _Arrivals = OrderedDict()
        self._classes: dict[_Class, _Arrivals] = {}
        self._class_of: dict[Sequence, _Class] = {}
        self._prompts: dict[int, _Arrivals] = {}  # by identity of the request
        self._num_arrivals = 0
        self._overtaking: list[int] = []  # sorted numbers of admitted samples that came after the oldest one here

    def __len__(self) -> int:
        return len(self._returned) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        yield from self._arrived

    def extend(self, samples: Iterable[Sequence]) -> None:
        """Samples of new requests arrive."""
        for sequence in samples:
            self._num_arrivals += 1
            self._arrived[sequence] = self._num_arrivals
            self._prompts.setdefault(id(sequence.request), OrderedDict())[sequence] = self._num_arrivals
            self._classify(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A running sample lost its slot; it goes first."""
        self._returned.appendleft(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """All that wait, in the order in which they should be admitted. Nothing may be changed meanwhile."""
        yield from self._returned
        if len(self._overtaking) >= self.max_overtaken:
            yield from self._arrived
        else:
            for _, _, sequence in heapq.merge(*map(self._ranked, self._classes.values())):
                yield sequence

    def admit(self, sequence: Sequence) -> None:
        """Take out a sample that was given a slot."""
        number = self._arrived.get(sequence)
        self.remove(sequence)
        if number is not None:
            insort(self._overtaking, number)
            oldest = next(iter(self._arrived.values()), math.inf)
            del self._overtaking[: bisect_left(self._overtaking, oldest)]

    def remove(self, sequence: Sequence) -> None:
        """Take out a sample, wherever it is."""
        if sequence not in self._arrived:
            self._returned.remove(sequence)
            return
        del self._arrived[sequence]
        self._declassify(sequence)
        siblings = self._prompts[id(sequence.request)]
        del siblings[sequence]
        if not siblings:
            del self._prompts[id(sequence.request)]

    def sibling(self, sequence: Sequence) -> Sequence | None:
        """The first sample of the same request that was never admitted, unless it may overtake no more."""
        siblings = self._prompts.get(id(sequence.request))
        if siblings is None:
            return None
        first = next(iter(siblings))
        is_oldest = next(iter(self._arrived)) is first
        return first if is_oldest or len(self._overtaking) < self.max_overtaken else None

    def observe(self, sequence: Sequence) -> None:
        """A sample has finished: what it needed tells of the others of its prompt."""
        self._lengths.observe(sequence)
        siblings = self._prompts.get(id(sequence.request))
        if siblings and self._class_of[next(iter(siblings))] != id(sequence.request):
            for sibling in siblings:
                self._declassify(sibling)
                self._classify(sibling)

    def _classify(self, sequence: Sequence) -> None:
        if self._lengths.knows_prompt(sequence):
            key: _Class = id(sequence.request)
        else:
            key = (bucket(sequence), sequence.num_remaining.bit_length())
        self._class_of[sequence] = key
        self._classes.setdefault(key, OrderedDict())[sequence] = self._arrived[sequence]

    def _declassify(self, sequence: Sequence) -> None:
        key = self._class_of.pop(sequence)
        members = self._classes[key]
        del members[sequence]
        if not members:
            del self._classes[key]

    def _ranked(self, members: _Arrivals) -> Iterator[tuple[int, int, Sequence]]:
        expected = self._lengths.total(next(iter(members)))
        rank = -round(4 * math.log2(expected))
        for sequence, number in members.items():
            yield rank, number, sequence
