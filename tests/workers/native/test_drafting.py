"""The compiled drafter of `auto` against the one in Python, whose proposals it must give exactly."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.auto import AutoDrafter
from workers.drafters.base import EMPTY_DRAFT, Draft, DraftContext, StepOutcome
from workers.drafters.native_auto import NativeAutoDrafter

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)

GROUPS = ("a", "b", "\0\udc80")
MOST_SAMPLES = 5


class Twins:
    """Both drafters, told and asked the same; a random world around them that looks a little like text."""

    def __init__(self, seed: int, vocabulary: int, capacity: int, finished_tokens: int) -> None:
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.reference = AutoDrafter(capacity=capacity, finished_tokens=finished_tokens)
        self.compiled = NativeAutoDrafter(capacity, finished_tokens)
        self.running: list[DraftContext] = []
        self.drafts: dict[int, Draft] = {}
        self.num_nodes = 0
        self._next_key = 7

    def token(self, tokens: list[int]) -> int:
        """The model's next token: mostly a function of the last two, so that texts repeat themselves."""
        if self.random.random() < 0.2:
            return self.random.randrange(self.vocabulary)
        return (tokens[-1] * 5 + tokens[max(-2, -len(tokens))] * 3 + 1) % self.vocabulary

    def start(self) -> None:
        prompts = {group: [(i * i + len(group)) % self.vocabulary for i in range(6)] for group in GROUPS}
        group = self.random.choice(GROUPS)
        context = DraftContext(self._next_key, group, [*prompts[group], 1], len(prompts[group]))
        self._next_key += 1
        for drafter in (self.reference, self.compiled):
            drafter.start(context)
        self.running.append(context)

    def propose(self) -> None:
        rows = [self.random.choice((0, 1, 2, 5, 20)) for _ in self.running]
        min_score = self.random.choice((0.0, 0.01, 0.2))
        expected = self.reference.propose(self.running, rows, min_score)
        assert self.compiled.propose(self.running, rows, min_score) == expected  # scores to the last bit
        self.drafts = {c.key: p.draft for c, p in zip(self.running, expected, strict=True)}
        self.num_nodes += sum(map(len, self.drafts.values()))

    def observe(self) -> None:
        """Every sample's part of the step, with a part of its draft; a few parts go by unobserved."""
        for context in self.running:
            draft = self.drafts.pop(context.key, EMPTY_DRAFT)
            draft = draft.keep(range(self.random.randint(0, len(draft))))
            outcome = self.outcome(draft, context.tokens)
            context.tokens += outcome.emitted
            if self.random.random() < 0.9:
                for drafter in (self.reference, self.compiled):
                    drafter.observe(context, outcome)

    def outcome(self, draft: Draft, tokens: list[int]) -> StepOutcome:
        texts = [list(tokens)]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        picks = [self.token(text) for text in texts]
        path = [0]
        while path[-1] >= 0:
            below = [i for i, parent in enumerate(draft.parents) if parent + 1 == path[-1]]
            if below and self.random.random() < 0.5:  # accept more than chance would
                picks[path[-1]] = draft.tokens[self.random.choice(below)]
            path.append(next((i + 1 for i in below if draft.tokens[i] == picks[path[-1]]), -1))
        path = path[: self.random.choice((-1, -1, -1, 1))]  # what is beyond the end of a sample is not emitted
        top = np.array([[(pick + i) % self.vocabulary for i in range(8)] for pick in picks])
        probs = np.array([np.sort(np.random.default_rng(pick).dirichlet([0.3] * 8))[::-1] for pick in picks])
        emitted = tuple(picks[row] for row in path)
        return StepOutcome(draft, tuple(picks), tuple(path), emitted, top, probs.astype(np.float32))

    def finish(self) -> None:
        context = self.running.pop(self.random.randrange(len(self.running)))
        for drafter in (self.reference, self.compiled):
            drafter.finish(context)

    def live(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.running) < MOST_SAMPLES and self.random.random() < 0.3:
                self.start()
            if self.random.random() < 0.8:
                self.propose()
            if self.random.random() < 0.9:
                self.observe()
            if self.running and self.random.random() < 0.1:
                self.finish()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    vocabulary=st.sampled_from((9, 60, 1 << 17)),
    capacity=st.sampled_from((1, 7, 100, 5000)),
    finished_tokens=st.sampled_from((1, 30, 300)),
)
def test_proposals_are_those_of_the_reference(seed: int, vocabulary: int, capacity: int, finished_tokens: int) -> None:
    Twins(seed, vocabulary, capacity, finished_tokens).live(60)


def test_over_a_long_time_too() -> None:
    """Claims fade, the table and the finished outputs are full, keys have more places than are kept."""
    twins = Twins(seed=1, vocabulary=40, capacity=500, finished_tokens=400)
    twins.live(1500)
    assert twins.num_nodes > 10_000


def test_many_steps_may_be_observed_before_the_next_proposal() -> None:
    twins = Twins(seed=2, vocabulary=40, capacity=5000, finished_tokens=100)
    for _ in range(3):
        twins.start()
    for _ in range(100):
        twins.observe()
    twins.propose()


def test_candidates_of_a_small_vocabulary_are_fewer() -> None:
    context = DraftContext(1, "g", [2, 0, 1, 2], 3)
    drafters = (AutoDrafter(), NativeAutoDrafter())
    for drafter in drafters:
        drafter.start(context)
    context.tokens.append(0)
    outcome = StepOutcome(
        EMPTY_DRAFT, (0,), (0,), (0,), np.array([[0, 1, 2]]), np.array([[0.9, 0.095, 0.005]], np.float32)
    )
    for drafter in drafters:
        drafter.observe(context, outcome)
    expected, compiled = (drafter.propose([context], [9], 0.0) for drafter in drafters)
    assert len(expected[0].draft) == 9
    assert compiled == expected
