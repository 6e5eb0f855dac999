"""A toy model and the decoding loop that every drafter's tests run under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from workers.drafters.base import Draft, DraftContext, Drafter, ExtraRows, StepOutcome

Model = Callable[[Sequence[int]], int]
"""The token that plain decoding emits after a prefix."""

VOCABULARY = 97


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    steps: int
    drafts: list[Draft]
    outcomes: list[StepOutcome]

    @property
    def tokens_per_step(self) -> float:
        return len(self.tokens) / self.steps


class ToyEngine:
    """Decodes as the real engine does: rows, picks, path following, cut at `max_tokens`; one sample at a time."""

    def plain(self, model: Model, prompt: Sequence[int], max_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(model(tokens))
        return tokens[len(prompt) :]

    def context(self, model: Model, prompt: Sequence[int], key: int = 0, group: str = "g") -> DraftContext:
        """A sample whose prompt has been read: the first token is emitted and pending."""
        return DraftContext(key, group, [*prompt, model(prompt)], len(prompt))

    def step(self, drafter: Drafter, model: Model, context: DraftContext, max_rows: int, room: int) -> StepOutcome:
        """Propose, verify, append at most `room` tokens, observe."""
        proposal = drafter.propose([context], [max_rows], 0.0)[0]
        draft = proposal.draft
        assert len(draft) <= max_rows
        check_tree(draft)
        prefixes = [list(context.tokens)]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            prefixes.append([*prefixes[parent + 1], token])
        picks = [model(prefix) for prefix in prefixes]
        path, emitted, row = [0], [picks[0]], child_of(draft, 0, picks[0])
        while row is not None and len(emitted) < room:
            path.append(row)
            emitted.append(picks[row])
            row = child_of(draft, row, picks[row])
        extra_picks = extra_rows_picks(model, context.tokens, proposal.extra) if proposal.extra else ()
        top = drafter.top_k
        outcome = StepOutcome(
            draft,
            tuple(picks),
            tuple(path),
            tuple(emitted),
            np.array([[(pick + i) % VOCABULARY for i in range(top)] for pick in picks]) if top else None,
            np.array([[0.5**i / 2 for i in range(top)]] * len(picks), np.float32) if top else None,
            extra_picks,
        )
        context.tokens.extend(emitted)
        drafter.observe(context, outcome)
        return outcome

    def decode(
        self,
        drafter: Drafter,
        model: Model,
        prompt: Sequence[int],
        max_tokens: int,
        max_rows: int = 16,
        key: int = 0,
        group: str = "g",
    ) -> Decoded:
        context = self.context(model, prompt, key, group)
        drafter.start(context)
        outcomes = []
        while (room := max_tokens - (len(context.tokens) - len(prompt))) > 0:
            outcomes.append(self.step(drafter, model, context, max_rows, room))
        drafter.finish(context)
        return Decoded(context.tokens[len(prompt) :], 1 + len(outcomes), [o.draft for o in outcomes], outcomes)


def child_of(draft: Draft, row: int, token: int) -> int | None:
    for i, (guess, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent + 1 == row and guess == token:
            return i + 1
    return None


def extra_rows_picks(model: Model, tokens: Sequence[int], extra: ExtraRows) -> tuple[int, ...]:
    """What the model says after each sampled extra row, whose prefix its mask spells out without gap or overlap."""
    picks = []
    for row in extra.sampled:
        seen = sorted((extra.offsets[i], extra.tokens[i]) for i in np.flatnonzero(extra.mask_EE[row]))
        assert [offset for offset, _ in seen] == list(range(1, extra.offsets[row] + 1))
        assert seen[-1] == (extra.offsets[row], extra.tokens[row])
        picks.append(model([*tokens, *(token for _, token in seen)]))
    return tuple(picks)


def check_tree(draft: Draft) -> None:
    """What holds for every draft: siblings differ, scores are probabilities that never rise along a path."""
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        assert 0.0 <= score <= (draft.scores[parent] if parent >= 0 else 1.0)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine()


def cycle(prefix: Sequence[int]) -> int:
    """Repeats itself with period 7."""
    return (3 * len(prefix)) % 7 + 10


def chaos(prefix: Sequence[int]) -> int:
    """Depends on the last five tokens, with few repetitions."""
    value = 0
    for token in prefix[-5:]:
        value = (value * 31 + token + 7) % 10007
    return value % VOCABULARY


def bigram(prefix: Sequence[int]) -> int:
    """Depends on the last two tokens: a walk through few states that falls into a long cycle."""
    return (prefix[-1] * 5 + prefix[-2] * 3 + 1) % 23


@pytest.fixture(params=[cycle, chaos, bigram], ids=lambda model: model.__name__)
def model(request: pytest.FixtureRequest) -> Model:
    result: Model = request.param
    return result
