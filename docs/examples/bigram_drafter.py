"""A worked example: a drafter that guesses what most often followed the last two tokens, in all samples so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from workers.drafters.base import EMPTY_PROPOSAL, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.chains import AcceptanceByDepth


class BigramDrafter:
    """One chain of guesses, grown token by token.

    Worked example: after `a b c .. a b d .. a b c .. a b` it guesses c, then what most often followed `b c`.
    """

    name = "bigram"
    top_k = 0  # it asks for no candidates of the model

    def __init__(self) -> None:
        self._followers: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self._read: dict[int, int] = {}  # tokens of each running sample that are counted already
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        self._read[context.key] = 0

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return [self._proposal(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)

    def finish(self, context: DraftContext) -> None:
        self._count(context)
        del self._read[context.key]

    def _proposal(self, context: DraftContext, rows: int) -> Proposal:
        self._count(context)
        chain: list[int] = []
        last = tuple(context.tokens[-2:])
        while len(chain) < rows and len(last) == 2 and last in self._followers:
            guess = self._followers[last].most_common(1)[0][0]
            chain.append(guess)
            last = (last[1], guess)
        if not chain:
            return EMPTY_PROPOSAL
        return Proposal(self._acceptance.scored(Draft.chain(tuple(chain), self.name)))

    def _count(self, context: DraftContext) -> None:
        """Steps may go by unobserved, so what is new is read from the committed tokens."""
        tokens = context.tokens
        for i in range(max(2, self._read[context.key]), len(tokens)):
            self._followers[tokens[i - 2], tokens[i - 1]][tokens[i]] += 1
        self._read[context.key] = len(tokens)
