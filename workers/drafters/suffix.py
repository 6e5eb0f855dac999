"""Suffix drafts: what followed earlier occurrences of the current context."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.groups import PerGroup
from workers.drafters.growth import Buckets, Claim, Grower
from workers.drafters.suffix_index import Match, SuffixIndex, followed

FINISHED_TOKENS = 1 << 17  # of finished outputs that are remembered: some 40 MB
_MAX_LENGTH = 12  # longer matches are calibrated together

Matches = list[Match]


def trust(length: int) -> float:
    """How far a match of this length is believed before any outcome: one token says little, ten say much."""
    return length / (length + 4.0)


class SuffixPredictor:
    """Next-token candidates by vote of the matches; the state is the list of matches that agree with the path so far.

    Samples of one prompt share an index of the prompt and of all their outputs; finished outputs of all prompts go to
    a second one.
    """

    name = "suffix"

    def __init__(self, max_match: int, use_finished: bool, finished_tokens: int = FINISHED_TOKENS) -> None:
        self._max_match = max_match
        self._groups = PerGroup(SuffixIndex)
        self._finished = SuffixIndex(key_lengths=(2,), max_tokens=finished_tokens) if use_finished else None
        self._buckets = Buckets(self.name)

    def start(self, context: DraftContext) -> None:
        """The first sample of a group brings the prompt to the index, the others only what they have beyond it."""
        first = 0 if self._groups.enter(context.group) else context.prompt_length
        self._groups[context.group].add(context.key, context.tokens, first)

    def catch_up(self, context: DraftContext, end: int) -> None:
        """Index the first `end` tokens of a sample as far as they are not."""
        self._groups[context.group].extend(context.key, context.tokens, end)

    def finish(self, context: DraftContext) -> None:
        self._groups.leave(context.group)
        if self._finished is not None:
            start = max(0, context.prompt_length - self._max_match)
            self._finished.add(context.key, context.tokens[start:], first=context.prompt_length - start)

    def root(self, context: DraftContext, end: int) -> Matches:
        self.catch_up(context, end)
        return self._matches(context.group, context.tokens, end, context.key)

    def advance(self, state: Matches, token: int) -> Matches:
        return followed(state, token)

    def probabilities(self, state: Matches) -> tuple[dict[int, float], int]:
        """Each match votes for the token that followed it, with a weight that doubles with every token of its length.
        Also the length of the longest match (0: no match, no probabilities)."""
        longest, total = 0, 0.0
        votes: dict[int, float] = {}
        for document, position, length, _ in state:
            token = document[position]
            vote = 2.0**length
            votes[token] = votes.get(token, 0.0) + vote
            total += vote
            if length > longest:
                longest = length
        return {token: vote / total for token, vote in votes.items()}, longest

    def claims(self, state: Matches, least: float) -> list[Claim]:
        probabilities, longest = self.probabilities(state)
        buckets = self._buckets.of(min(longest, _MAX_LENGTH), min(len(state), 3))
        return [
            (token, claimed, buckets[int(claimed * 4)])
            for token, p in probabilities.items()
            if (claimed := p * trust(longest)) > least
        ]

    def continuation(self, context: DraftContext, guesses: list[int], count: int) -> list[int]:
        """The likeliest `count` tokens after the committed ones and `guesses`; fewer where the matches end."""
        self.catch_up(context, len(context.tokens))
        tokens = context.tokens[-self._max_match :] + guesses
        state = self._matches(context.group, tokens, len(tokens), own=None)
        chain: list[int] = []
        while state and len(chain) < count:
            probabilities, _ = self.probabilities(state)
            chain.append(max(probabilities, key=probabilities.__getitem__))
            state = self.advance(state, chain[-1])
        return chain

    def _matches(self, group: str, tokens: Sequence[int], end: int, own: int | None) -> Matches:
        matches = self._groups[group].matches(tokens, end, self._max_match, own)
        if self._finished is not None:
            matches += self._finished.matches(tokens, end, self._max_match)
        return matches


class SuffixDrafter:
    """The suffix predictor alone."""

    name = SuffixPredictor.name
    top_k = 0

    def __init__(self, max_match: int, use_finished: bool) -> None:
        self._predictor = SuffixPredictor(max_match, use_finished)
        self._grower = Grower(self._predictor)

    def start(self, context: DraftContext) -> None:
        self._predictor.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return self._grower.propose(contexts, max_rows, min_score)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._grower.grade(context, outcome.emitted)
        self._predictor.catch_up(context, len(context.tokens))

    def finish(self, context: DraftContext) -> None:
        self._grower.forget(context)
        self._predictor.finish(context)
