"""Jacobi decoding: a chain of guesses that each step predicts anew, in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from workers.drafters.base import EMPTY_PROPOSAL, Draft, DraftContext, Proposal, StepOutcome
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
        self._guesses: dict[int, tuple[int, list[int]]] = {}  # tokens that were committed then, guesses after them
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        self._guesses[context.key] = (len(context.tokens), [])
        if self._suffix is not None:
            self._suffix.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return [self._proposal(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def _proposal(self, context: DraftContext, rows: int) -> Proposal:
        if rows == 0:
            return EMPTY_PROPOSAL
        made_at, guesses = self._guesses[context.key]
        chain = guesses[:rows] if made_at == len(context.tokens) else []  # what went by unobserved refuted the rest
        chain += self._fill(context, chain, rows - len(chain))
        return Proposal(self._acceptance.scored(Draft.chain(tuple(chain), self.name)))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)
        self._guesses[context.key] = (len(context.tokens), list(outcome.picks[len(outcome.emitted) :]))

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
