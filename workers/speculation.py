"""The guessing half of an engine: drafter and window policy, and what each step tells them.

Shape legend: A sampled rows of branches, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from torch import Tensor

from pipeline.config import EngineConfig
from pipeline.decoding_config import DecodingConfig, Windowed
from workers.drafters.base import EMPTY_PROPOSAL, BranchingDrafter, Drafter, Proposal, StepOutcome
from workers.drafters.build import build_drafter
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner
from workers.planned_block import PlannedBlock
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Sequence
from workers.step_sampling import Candidates
from workers.window_policy import StepLoad, StepMeasure, StepRoom, WindowPolicy, Windows, token_values
from workers.windows import build_policy

_NO_LOAD = StepLoad((), (), (), StepRoom(0, 0))


class Speculation:
    """Proposes drafts for a step and learns from its outcome, as far as the policy wants that."""

    def __init__(self, drafter: Drafter, policy: WindowPolicy, max_context: int) -> None:
        self.last_step: StepMeasure | None = None
        self._learning = False
        self._drafter = drafter
        self._policy = policy
        self._max_context = max_context
        self._load = _NO_LOAD
        self._draft_rows = 0
        self._seconds = 0.0

    @property
    def draft_rows(self) -> int:
        """Rows that the last step verified beside pending tokens and prompts."""
        return self._draft_rows

    @property
    def top_k(self) -> int:
        """Candidates per row that `observe` wants in this step."""
        return self._drafter.top_k if self._learning else 0

    def propose(self, schedule: Schedule, scheduler: Scheduler) -> list[Proposal]:
        """Drafts of the decoding sequences, cut to what the sample may still emit and to what the policy buys."""
        began = time.perf_counter()
        decoding = schedule.decoding
        self._load = StepLoad(
            [sequence.context.key for sequence in decoding],
            [sequence.num_cached for sequence in decoding],
            [1.0] * len(decoding),
            schedule.room,
            schedule.num_waiting,
        )
        windows = self._policy.windows(self._load)
        self._learning = windows.learning
        proposals = [EMPTY_PROPOSAL] * len(decoding)
        self._draft_rows = 0
        if any(windows.rows):
            if schedule.num_waiting == 0 and len(decoding) > 1:
                remaining = [scheduler.expected_remaining(sequence) for sequence in decoding]
                load = self._load
                self._load = StepLoad(load.keys, load.columns, token_values(remaining), load.room, load.waiting)
            proposals = self._policy.select(self._proposed(decoding, windows), self._load)
            self._draft_rows = sum([len(p.draft.tokens) + p.extra_rows for p in proposals if p is not EMPTY_PROPOSAL])
        self._seconds = time.perf_counter() - began
        return proposals

    def start(self, sequence: Sequence) -> None:
        self._drafter.start(sequence.context)

    def observe(
        self,
        item: PlannedBlock,
        path: tuple[int, ...],
        picks: Seq[int],
        candidates: Candidates | None,
        extra_picks: Seq[int],
    ) -> None:
        """What came of one sequence's block: `path` of rows that emitted, `picks` after every row of its tree."""
        if not self._learning:
            return
        began = time.perf_counter()
        assert item.proposal is not None
        draft, context = item.proposal.draft, item.sequence.context
        emitted = tuple([picks[row] for row in path])
        tokens_RK, probs_RK = (None, None) if candidates is None else candidates
        self._drafter.observe(
            context, StepOutcome(draft, tuple(picks), path, emitted, tokens_RK, probs_RK, tuple(extra_picks))
        )
        self._policy.observe(context.key, draft, len(path) - 1)
        self._seconds += time.perf_counter() - began

    def read_branches(self, items: Seq[PlannedBlock], accepted: Seq[int], logits_AV: Tensor) -> None:
        """Hand to the drafter each sequence's branch that fits what was accepted. `logits_AV` are those of all branches
        of `items`, in order."""
        began = time.perf_counter()
        contexts, parts, first = [], [], 0
        for item, depth in zip(items, accepted, strict=True):
            assert item.proposal is not None
            tokens = item.sequence.tokens
            along_chain = tuple(tokens[len(tokens) - 1 - depth : -1]) == item.proposal.draft.tokens[:depth]
            for branch in item.proposal.branches:
                end = first + len(branch) - 1
                if branch.depth == depth and along_chain and item.sequence.finish_reason is None:
                    contexts.append(item.sequence.context)
                    parts.append(logits_AV[first:end])
                first = end
        if contexts:
            cast(BranchingDrafter, self._drafter).read_branches(contexts, parts)
        self._seconds += time.perf_counter() - began

    def measured(self, sampled_rows: int, emitted: int, forward_s: float, total_s: float) -> None:
        """The step ended; `emitted` counts the tokens of the decoding sequences."""
        self.last_step = StepMeasure(
            self._load, self._draft_rows, sampled_rows, emitted, forward_s, self._seconds, total_s
        )
        self._policy.measured(self.last_step)

    def finish(self, sequence: Sequence) -> None:
        """A sample is gone: drafter and policy drop what they keep of it."""
        if sequence.started:
            self._drafter.finish(sequence.context)
            self._policy.finish(sequence.context.key)

    def _proposed(self, decoding: Seq[Sequence], windows: Windows) -> list[Proposal]:
        # The last token of a step is never a guess, so with one token to go there is nothing to guess.
        depths = [sequence.num_remaining - 1 for sequence in decoding]
        most = [rows if depth else 0 for rows, depth in zip(windows.rows, depths, strict=True)]
        proposals = self._drafter.propose([sequence.context for sequence in decoding], most, windows.min_score)
        for i, proposal in enumerate(proposals):
            if proposal is EMPTY_PROPOSAL:
                continue
            size = len(proposal.draft.tokens)
            assert size <= most[i], (self._drafter.name, size, most[i])
            if size > depths[i]:
                proposal = proposal.bought(proposal.draft.up_to_depth(depths[i]))
            proposals[i] = self._within_context(decoding[i], proposal)
        return proposals

    def _within_context(self, sequence: Sequence, proposal: Proposal) -> Proposal:
        """Without extra rows or branches that lie beyond the context: there some models change the frequencies of the
        step."""
        if not proposal.extra_rows:
            return proposal
        room = self._max_context - sequence.num_cached
        extra = proposal.extra
        if extra is not None and max(extra.offsets, default=0) >= room:
            extra = None
        branches = tuple(branch for branch in proposal.branches if branch.depth + len(branch) <= room)
        return replace(proposal, extra=extra, branches=branches)


def build_speculation(
    config: DecodingConfig, target: LoadedModel, engine: EngineConfig, runner: ModelRunner, max_context: int
) -> Speculation | None:
    """None for plain decoding. Raises ConfigError when the strategy needs a draft model that does not fit."""
    drafter = build_drafter(config, target, engine, runner)
    if drafter is None:
        return None
    assert isinstance(config, Windowed)
    max_rows = min(engine.max_tokens_per_step, engine.max_sequences + config.max_draft_rows)
    return Speculation(drafter, build_policy(config, runner, max_rows), max_context)
