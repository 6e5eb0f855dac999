"""Suffix drafts: what followed earlier occurrences of the current context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.growth import MIN_SCORE, Bucket, Candidate, grade, grow
from workers.drafters.suffix_index import Match, SuffixIndex

_FINISHED_TOKENS = 1 << 17  # of finished outputs that are remembered: some 40 MB
_MAX_LENGTH = 12  # longer matches are calibrated together
_LENGTH_WEIGHT = 2.0  # a match that is one token longer weighs this much more

Matches = list[Match]


@dataclass(slots=True)
class _Group:
    """What the samples of one prompt share."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    running: int = 0


class SuffixPredictor:
    """Next-token candidates by vote of the matches; the state is the list of matches that agree with the path so far.

    Samples of one prompt share an index of the prompt and of all their outputs; finished outputs of all prompts go to
    a second one.
    """

    def __init__(self, max_match: int, use_finished: bool) -> None:
        self._max_match = max_match
        self._groups: dict[str, _Group] = {}
        self._finished = SuffixIndex(key_lengths=(2,), max_tokens=_FINISHED_TOKENS) if use_finished else None
        self._buckets: dict[tuple[int, int], Bucket] = {}

    def start(self, context: DraftContext) -> None:
        """The first sample of a group brings the prompt to the index, the others only what they have beyond it."""
        group = self._groups.get(context.group)
        if group is None:
            group = self._groups[context.group] = _Group()
            group.index.add(context.key, context.tokens)
        else:
            group.index.add(context.key, context.tokens, first=context.prompt_length)
        group.running += 1

    def extend(self, context: DraftContext, tokens: Sequence[int]) -> None:
        self._groups[context.group].index.extend(context.key, tokens)

    def finish(self, context: DraftContext) -> None:
        group = self._groups[context.group]
        group.running -= 1
        if group.running == 0:
            del self._groups[context.group]
        if self._finished is not None:
            start = max(0, context.prompt_length - self._max_match)
            self._finished.add(context.key, context.tokens[start:], first=context.prompt_length - start)

    def root(self, context: DraftContext, end: int) -> Matches:
        return self._matches(context.group, context.tokens, end, context.key)

    def advance(self, state: Matches, token: int) -> Matches:
        return [after for match in state if match.token == token and (after := match.after()) is not None]

    def candidates(self, state: Matches) -> list[Candidate]:
        votes: dict[int, list[float]] = {}  # token -> [weight, longest match, matches]
        total = 0.0
        for match in state:
            weight = _LENGTH_WEIGHT ** match.length
            total += weight
            vote = votes.setdefault(match.token, [0.0, 0, 0])
            vote[0] += weight
            vote[1] = max(vote[1], match.length)
            vote[2] += 1
        return [
            Candidate(token, weight / total, self._bucket(int(length), int(count)))
            for token, (weight, length, count) in votes.items()
        ]

    def continuation(self, context: DraftContext, guesses: list[int], count: int) -> list[int]:
        """The likeliest `count` tokens after the committed ones and `guesses`; fewer where the matches end."""
        tokens = context.tokens[-self._max_match :] + guesses
        state = self._matches(context.group, tokens, len(tokens), own=None)
        chain: list[int] = []
        while state and len(chain) < count:
            best = max(self.candidates(state), key=lambda candidate: candidate.claimed)
            chain.append(best.token)
            state = self.advance(state, best.token)
        return chain

    def _matches(self, group: str, tokens: Sequence[int], end: int, own: int | None) -> Matches:
        matches = self._groups[group].index.matches(tokens, end, self._max_match, own)
        if self._finished is not None:
            matches += self._finished.matches(tokens, end, self._max_match)
        return matches

    def _bucket(self, length: int, count: int) -> Bucket:
        key = (min(length, _MAX_LENGTH), min(count, 3))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket("suffix", prior=length / (length + 2.0))
        return bucket


class SuffixDrafter:
    """The suffix predictor alone."""

    name = "suffix"
    top_k = 0

    def __init__(self, max_match: int, use_finished: bool) -> None:
        self._predictor = SuffixPredictor(max_match, use_finished)

    def start(self, context: DraftContext) -> None:
        self._predictor.start(context)

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        return Proposal(grow(self._predictor, self._predictor.root(context, len(context.tokens)), max_rows, MIN_SCORE))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        before = len(context.tokens) - len(outcome.emitted)
        grade(self._predictor, self._predictor.root(context, before), outcome.emitted)
        self._predictor.extend(context, outcome.emitted)

    def finish(self, context: DraftContext) -> None:
        self._predictor.finish(context)
