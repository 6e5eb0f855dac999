"""Drafts on or off, by what was measured: a wrong cost model then costs no more than the measuring.

Per occupancy (number of decoding sequences, in coarse classes), tokens per second with and without drafts are compared
in short interleaved stretches. The better side is kept, and looked at again ever more rarely while it stays better.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_STRETCH = 64
LOOK = 8
"""Steps of a look at the other side."""
LONGEST_STRETCH = 1024
CLEAR = 1.15
"""Drafts that measure so much faster than the plain step is predicted to be need no look at it."""


@dataclass(slots=True)
class _Tally:
    """Tokens and seconds, the older ones counting ever less."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def fade(self) -> None:
        self.tokens /= 2
        self.seconds /= 2


@dataclass(slots=True)
class _Occupancy:
    drafting: bool = True
    looking: bool = False
    stretch: int = FIRST_STRETCH
    steps_left: int = FIRST_STRETCH
    tallies: dict[bool, _Tally] = field(default_factory=lambda: {True: _Tally(), False: _Tally()})


class Latch:
    """Whether to draft with so many sequences running."""

    def __init__(self) -> None:
        self._occupancies: dict[int, _Occupancy] = {}

    def drafting(self, sequences: int) -> bool:
        state = self._of(sequences)
        return state.drafting != state.looking

    def record(self, sequences: int, drafting: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """A step of `sequences` ended; `plain_rate` is what plain decoding is predicted to do (tokens per second)."""
        state = self._of(sequences)
        state.tallies[drafting].tokens += tokens
        state.tallies[drafting].seconds += seconds
        if drafting != (state.drafting != state.looking):
            return
        state.steps_left -= 1
        if state.steps_left > 0:
            return
        if state.looking:
            self._decide(state)
        elif state.drafting and state.tallies[True].rate > CLEAR * plain_rate:
            state.tallies[True].fade()
            state.steps_left = state.stretch
        else:
            state.looking, state.steps_left = True, LOOK

    def _decide(self, state: _Occupancy) -> None:
        drafting = state.tallies[True].rate > state.tallies[False].rate
        state.stretch = min(2 * state.stretch, LONGEST_STRETCH) if drafting == state.drafting else FIRST_STRETCH
        state.drafting, state.looking, state.steps_left = drafting, False, state.stretch
        for tally in state.tallies.values():
            tally.fade()

    def _of(self, sequences: int) -> _Occupancy:
        """One state for each of 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..: within a class the plain step costs much the
        same."""
        size = max(1, sequences)
        step = max(1, 1 << max(0, (size - 1).bit_length() - 2))
        return self._occupancies.setdefault(-(-size // step) * step, _Occupancy())
