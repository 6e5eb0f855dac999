"""Drafts on or off, by what was measured: a wrong cost model then costs no more than the measuring.

Per occupancy (number of decoding sequences, in coarse classes), tokens per second with and without drafts are compared
in short interleaved stretches. The better side is kept, and looked at again ever more rarely while it stays better. It
begins with drafts where rows are cheap, and else without, while the drafter learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

WARM_UP_TOKENS = 256
"""Sequence-steps that are not counted: a drafter that knows nothing yet must not be judged. With drafts on, the first
stretch that counts is as long."""
LOOK_TOKENS, SHORTEST_STRETCH = 128, 4
"""Sequence-steps of a look at the other side, and the fewest steps of any. Looks of half as many told 1.02 to 1.15 of
drafts that longer ones find to be at 1.03 to 1.07 (batch 8, replayed). Where both sides are near, a long look costs
next to nothing, and a clear one ends early."""
FIRST_STRETCH, LONGEST_STRETCH = 32, 2048
"""Steps between looks: few at first, as drafts get better while the drafter learns, and a first look says little."""
LOOK_SHARE = 0.02
"""Of the tokens of a stretch, what the look before it may have lost: a longer stretch follows a dearer look."""
APART = 0.15
"""What it costs that drafts let samples of equal length end apart, of the time of one batch: the last slots run dry one
by one. Counted in a replay with drafts always on: 0.16 at batch 8, 0.10 at 16."""
CLEAR = 1.15
"""Drafts that measure so much faster than the plain step is predicted to be need no look at it."""
FEWEST_STEPS, NOT_COUNTED = 8, 8
"""Steps before anything is called hopeless; those at the very start that may hold what is done only once."""
HOPELESS = 0.7
"""Drafts that measure so much slower than plain steps are not tried to the end of their stretch, nor warmed up. A look,
which is not for learning, ends at less of a difference the more was seen (see `hopeless`)."""


@dataclass(slots=True)
class _Tally:
    """Tokens and seconds, the older ones counting ever less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def fade(self) -> None:
        self.tokens /= 2
        self.seconds /= 2


@dataclass(slots=True)
class _Occupancy:
    look: int
    warm_up: int
    drafting: bool
    looking: bool = False
    stretch: int = FIRST_STRETCH
    steps_left: int = 0
    steps: int = 0
    """Of the stretch or the look in progress, or of the warm-up."""
    tallies: dict[bool, _Tally] = field(default_factory=lambda: {True: _Tally(), False: _Tally()})
    seen: _Tally = field(default_factory=_Tally)
    """In the look in progress."""

    def look_at_the_other(self) -> None:
        self.looking, self.steps_left, self.steps, self.seen = True, self.look, 0, _Tally()


class Latch:
    """Whether to draft with so many sequences running."""

    def __init__(self, rows_are_cheap: Callable[[int], bool]) -> None:
        """`rows_are_cheap` tells whether drafts are likely to pay with so many sequences running."""
        self._rows_are_cheap = rows_are_cheap
        self._occupancies: dict[int, _Occupancy] = {}

    def drafting(self, sequences: int) -> bool:
        state = self._of(sequences)
        return state.drafting != state.looking

    def warming_up(self, sequences: int) -> bool:
        """Whether the drafter should see every step, also those without drafts."""
        return self._of(sequences).warm_up > 0

    def record(
        self, sequences: int, drafting: bool, tokens: int, seconds: float, plain_rate: float, waiting: int
    ) -> None:
        """A step of `sequences` ended, while so many samples wait; `plain_rate` is what plain decoding is predicted to
        do (tokens per second).
        """
        state = self._of(sequences)
        state.steps += 1
        if state.warm_up:
            self._warm_up(state, drafting, tokens, seconds, plain_rate)
            return
        state.tallies[drafting].add(tokens, seconds)
        if drafting != (state.drafting != state.looking):
            return
        state.steps_left -= 1
        if state.looking:
            state.seen.add(tokens, seconds)
        plain = state.tallies[False].rate or plain_rate
        is_tried = drafting and state.steps >= FEWEST_STEPS
        least = hopeless(state.steps * sequences) if state.looking else HOPELESS
        is_hopeless = is_tried and state.tallies[True].rate < least * plain
        if state.steps_left > 0 and not is_hopeless:
            return
        if state.looking:
            self._decide(state, sequences, margin(sequences, waiting))
        elif state.drafting and state.tallies[True].rate > CLEAR * plain_rate:
            state.tallies[True].fade()
            state.steps_left = state.stretch
        else:
            state.look_at_the_other()

    def _warm_up(self, state: _Occupancy, drafting: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """What drafts give now says little of what they will give, unless it is next to nothing."""
        state.warm_up -= 1
        if not drafting or state.steps <= NOT_COUNTED:
            return
        tally = state.tallies[True]
        tally.add(tokens, seconds)
        if state.steps >= NOT_COUNTED + FEWEST_STEPS and tally.rate < HOPELESS * plain_rate:
            state.warm_up = 0
            state.look_at_the_other()
        elif not state.warm_up:
            state.tallies[True] = _Tally()

    def _decide(self, state: _Occupancy, sequences: int, margin: float) -> None:
        drafts, plain = state.tallies[True].rate, state.tallies[False].rate
        drafting = drafts > margin * plain
        if drafting != state.drafting:
            state.stretch = FIRST_STRETCH
        else:
            lost = state.seen.seconds * state.tallies[drafting].rate - state.seen.tokens
            state.stretch = max(min(2 * state.stretch, LONGEST_STRETCH), round(lost / (LOOK_SHARE * sequences)))
        state.drafting, state.looking, state.steps_left, state.steps = drafting, False, state.stretch, 0
        for tally in state.tallies.values():
            tally.fade()

    def _of(self, sequences: int) -> _Occupancy:
        """One state for each of 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..: within a class the plain step costs much the
        same."""
        size = max(1, sequences)
        step = max(1, 1 << max(0, (size - 1).bit_length() - 2))
        occupancy = -(-size // step) * step
        if occupancy not in self._occupancies:
            look, first = (max(SHORTEST_STRETCH, n // occupancy) for n in (LOOK_TOKENS, WARM_UP_TOKENS))
            cheap = self._rows_are_cheap(occupancy)
            self._occupancies[occupancy] = _Occupancy(look, first, cheap, steps_left=first if cheap else 1)
        return self._occupancies[occupancy]


def hopeless(sequence_steps: int) -> float:
    """The part of the plain rate below which a look at drafts ends: chance falls with the root of what was seen.

    Worked example: 0.7 after 16 sequence-steps, 0.85 after 64.
    """
    return 1.0 - (1.0 - HOPELESS) * math.sqrt(16 / sequence_steps)


def margin(sequences: int, waiting: int) -> float:
    """What drafts must win by: the price of ending apart is paid once, however many batches still wait.

    Worked example, 16 running: with 48 waiting 1.0375, with 1,600 waiting 1.0015. In the tail it is paid already: 1.
    """
    return 1.0 + APART / (1.0 + waiting / sequences) if waiting else 1.0
