"""Jacobi decoding: a chain of guesses that each step predicts anew, in parallel."""

from __future__ import annotations

from typing import Literal

from workers.drafters.base import Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.chains import AcceptanceByDepth, random_of
from workers.drafters.suffix import SuffixPredictor

_MAX_MATCH = 16  # of the suffix matches that fill the window with init = suffix


class JacobiDrafter:
    """The outputs beyond the first mismatch are the next guesses; `init` says what fills the empty end of the window.

    Worked example: pending `a`, guesses b c d e; the rows of a b c d e pick b x y z w. Then b is accepted, x is the
    correction and becomes pending, and the outputs after the mismatching guess, y z w, are the next guesses.
    """

    name = "jacobi"
    top_k = 0

    def __init__(self, init: Literal["copy", "random", "suffix"]) -> None:
        self._init = init
        self._suffix = SuffixPredictor(_MAX_MATCH, use_finished=True) if init == "suffix" else None
        self._guesses: dict[int, list[int]] = {}
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        self._guesses[context.key] = []
        if self._suffix is not None:
            self._suffix.start(context)

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        chain = self._guesses[context.key][:max_rows]
        chain += self._fill(context, chain, max_rows - len(chain))
        size = len(chain)
        draft = Draft(tuple(chain), tuple(range(-1, size - 1)), (0.0,) * size, (self.name,) * size)
        return Proposal(self._acceptance.scored(draft))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)
        self._guesses[context.key] = list(outcome.picks[len(outcome.emitted) :])
        if self._suffix is not None:
            self._suffix.extend(context, outcome.emitted)

    def finish(self, context: DraftContext) -> None:
        del self._guesses[context.key]
        if self._suffix is not None:
            self._suffix.finish(context)

    def _fill(self, context: DraftContext, chain: list[int], count: int) -> list[int]:
        if self._init == "random":
            generator = random_of(context)
            return [generator.choice(context.tokens[: context.prompt_length]) for _ in range(count)]
        tail = self._suffix.continuation(context, chain, count) if self._suffix is not None else []
        last = (context.tokens[-1:] + chain + tail)[-1]
        return tail + [last] * (count - len(tail))
