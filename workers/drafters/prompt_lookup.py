"""Prompt lookup (Saxena 2023), as HF and vLLM have it: one chain, copied from the latest longest match."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import EMPTY_PROPOSAL, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.chains import AcceptanceByDepth
from workers.drafters.suffix_index import SuffixIndex


class PromptLookupDrafter:
    """The tokens that followed the longest earlier occurrence of the last 1 to `max_match` tokens in the sample's own
    prompt and output; of equally long ones, the latest.

    Worked example: after `a b c a b d b` the last token `b` occurred twice alone; the later one was followed by d, b.
    """

    name = "prompt_lookup"
    top_k = 0

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self._texts: dict[int, SuffixIndex] = {}
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        index = SuffixIndex(key_lengths=(1,), max_positions=len(context.tokens) + context.sampling.max_tokens)
        index.add(context.key, context.tokens)
        self._texts[context.key] = index

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return [self._proposal(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)

    def finish(self, context: DraftContext) -> None:
        del self._texts[context.key]

    def _proposal(self, context: DraftContext, rows: int) -> Proposal:
        if rows == 0:
            return EMPTY_PROPOSAL
        tokens = context.tokens
        index = self._texts[context.key]
        index.extend(context.key, tokens, len(tokens))
        matches = index.matches(tokens, len(tokens), self._max_match)
        if not matches:
            return EMPTY_PROPOSAL
        _, position, _, _ = max(matches, key=lambda match: match[2])  # matches come latest first
        chain = tuple(tokens[position : position + rows])
        return Proposal(self._acceptance.scored(Draft.chain(chain, self.name)))
