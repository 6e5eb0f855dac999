"""Windows of an adapter's slots and what is kept of them: a chain of guesses, or one for each set of noise.

Where there are several sets (`workers/noise_sets.py`), the next stretch takes one of them, which is not known before
its first token is verified. So the windows that reach it are run with each set, and their chains make one tree: up to
there all are the same. They share the rows that the sample may draft, and end with that stretch: which set the one
after it takes is open too, and M x M chains would hardly pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from workers.drafters.base import Draft, DraftContext, TreeBuilder
from workers.drafters.growth import Claim, grade_chain, likely_chain
from workers.randomness import NoiseKey


@dataclass(frozen=True, slots=True)
class Window:
    """Slots for a sample, the first of which predicts token `target` of prompt and output, after `last_token`.

    `noise_set` picks the tokens of a stretch that has not begun.
    """

    context: DraftContext
    target: int
    last_token: int
    slots: int
    noise_set: int = 0

    def streams(self, first: int, end: int) -> tuple[list[NoiseKey], list[int]]:
        """Noise keys and token indices of slots [first, end)."""
        begin = self.target - self.context.prompt_length
        indices = list(range(begin + first, begin + end))
        if not self.context.sampling.chooses_noise:
            return [self.context.noise] * len(indices), indices
        return [self.context.noise_at(index, self.noise_set) for index in indices], indices


def next_windows(context: DraftContext, rows: int, most: int) -> list[Window]:
    """Windows for the tokens to come, of `rows` slots together, each of `most` at most.

    Worked example, 4 sets, stretches of 8, 2 tokens before the next: 12 rows are windows of 3 slots with each set, but
    8 rows are windows of 4 slots with the first two sets, and 4 rows are one window.
    """
    target, last_token = len(context.tokens), context.tokens[-1]
    if not context.sampling.chooses_noise:
        slots = min(rows, most)
        return [Window(context, target, last_token, slots)] if slots > 0 else []
    known = context.until_choice
    sets = max(1, min(context.sampling.noise_sets, rows // (known + 1))) if most > known else 1
    slots = min(rows // sets, most, known + context.sampling.noise_stretch)
    return [Window(context, target, last_token, slots, index) for index in range(sets)] if slots > 0 else []


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses of the tokens after the first `committed` ones: `chains[m]` as set m of noise would pick them.

    The chains part at guess `choice`; None where there is but one set of noise.
    """

    committed: int
    chains: tuple[tuple[Claim, ...], ...]
    choice: int | None = None

    def draft(self, rows: int, least_score: float, drafter: str, sets: int) -> Draft:
        """The guesses that score at least so much, of `rows` at most; each set is as likely to be taken as any."""
        chances = [self._chances(chain[:rows], sets) for chain in self.chains]
        if len(self.chains) == 1:
            return likely_chain(self.chains[0][:rows], chances[0], least_score, drafter)
        scored = [
            [(token, score) for (token, _, _), score in zip(chain, accumulate(some, mul), strict=False)]
            for chain, some in zip(self.chains, chances, strict=True)
        ]
        draft = _tree(scored, self.choice or 0, drafter)
        return draft.keep(node for node, score in enumerate(draft.scores) if score >= least_score)

    def _chances(self, chain: Sequence[Claim], sets: int) -> list[float]:
        chances = [bucket.chance(claimed) for _, claimed, bucket in chain]
        if self.choice is not None and self.choice < len(chances):
            chances[self.choice] /= sets
        return chances

    def grade(self, emitted: Sequence[int], sets: Sequence[int]) -> None:
        """Record which guesses came true; `sets` are those that picked the emitted tokens."""
        chain = self.chains[0]
        if self.choice is not None and self.choice < len(emitted):
            taken = sets[self.choice]
            chain = self.chains[taken] if taken < len(self.chains) else chain[: self.choice]
        grade_chain(chain, emitted)


def _tree(chains: Sequence[Sequence[tuple[int, float]]], choice: int, drafter: str) -> Draft:
    """Chains of (token, score) as one tree. Sets that pick the same token from `choice` on add up.

    Worked example, choice 1: a .9, b .4 and a .9, b .3, c .2 give a .9, b .7, c .2.
    """
    builder = TreeBuilder()
    for chain in chains:
        parent, bound = -1, 1.0
        for place, (token, score) in enumerate(chain):
            node = builder.child(parent, token)
            if node is None:
                node = builder.add(parent, token, score, drafter)
            elif place >= choice:
                builder.scores[node] = min(builder.scores[node] + score, bound)
            parent, bound = node, builder.scores[node]
    return builder.build()
