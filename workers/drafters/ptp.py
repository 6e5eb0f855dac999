"""Parallel token prediction (arXiv 2512.21323): an adapter drafts from the noise that will pick the tokens.

A window of slots sees u of the tokens to come (`workers/ptp/auxiliary_embedding.py`), so all of them are guessed in one
forward. Two ways to run it, with the same guesses:

- serial: `propose` runs the windows of all samples in a forward of their own;
- one pass: the windows run in the forward that verifies the current drafts, one branch for each likely number of
  accepted drafts. The branch that turns out to fit holds the next drafts. Its slot 0 guesses what that very step emits,
  so it is not read. This saves reading the weights twice, for rows that mostly go unused: right where rows are idle.

Shape legend: W windows, L slots, E hidden, R rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from pipeline.adapter_config import AdaptConfig
from pipeline.config import SamplingConfig
from workers.blocks import prompt_block, slot_block
from workers.drafters.base import EMPTY_DRAFT, EMPTY_PROPOSAL, Branch, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.draft_cache import DraftCache
from workers.drafters.growth import Buckets, Claim, grade_chain
from workers.kv_cache import Slot
from workers.model_runner import ModelRunner
from workers.ptp.adapter import Adapter
from workers.randomness import NoiseKey, streams, uniforms
from workers.sampling import pick
from workers.step_sampling import top_candidates

logger = logging.getLogger(__name__)

_YIELD_RATE = 0.02  # of the running mean of accepted drafts per step that had some


@dataclass(frozen=True, slots=True)
class _Window:
    """Slots for a sample, the first of which predicts token `target` of prompt and output, after `last_token`."""

    context: DraftContext
    target: int
    last_token: int
    slots: int

    def streams(self, first: int, end: int) -> tuple[list[NoiseKey], list[int]]:
        """Noise keys and token indices of slots [first, end)."""
        begin = self.target - self.context.prompt_length
        return [self.context.noise] * (end - first), list(range(begin + first, begin + end))


@dataclass(frozen=True, slots=True)
class _Chain:
    """Guesses of the tokens after the first `committed` ones."""

    committed: int
    claims: tuple[Claim, ...]


class PTPDrafter:
    """Chains of an adapter, for all samples of a step in one batch."""

    name = "ptp"
    top_k = 0

    def __init__(
        self,
        adapter: Adapter,
        runner: ModelRunner,
        max_context: int,
        *,
        branches: int = 0,
        own_cache: DraftCache | None = None,
    ) -> None:
        """`runner` runs the adapter's base, up to position `max_context`. With `branches` > 0 drafting and verifying
        are one pass; with `own_cache` the base is not the target but a smaller model that reads along.
        """
        self._adapter = adapter
        self._runner = runner
        self._max_context = max_context
        self._branches = branches
        self._own_cache = own_cache
        self._slots = adapter.config.slots
        self._stands_in = int(adapter.config.slot_zero == "context_token")  # slot 0 takes the last token's place
        self._chains: dict[int, _Chain] = {}
        self._buckets = Buckets(self.name)
        self._mean_accepted = 1.0
        self._warned: set[SamplingConfig] = set()

    def start(self, context: DraftContext) -> None:
        """Warns, once for each kind, when samples are drawn in another way than the adapter was trained for."""
        if context.sampling not in self._warned:
            self._warned.add(context.sampling)
            _warn_of_mismatch(self._adapter, context.sampling)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        """Chains as long as their score stays at `min_score`; in one pass, also the branches for the next ones."""
        if not self._branches:
            self._draft([(context, rows) for context, rows in zip(contexts, max_rows, strict=True) if rows])
        drafts = [
            self._chain(context, rows, min_score) if rows else EMPTY_DRAFT
            for context, rows in zip(contexts, max_rows, strict=True)
        ]
        if not self._branches:
            return [Proposal(draft) for draft in drafts]
        return self._with_branches(contexts, max_rows, drafts)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        chain = self._chains.get(context.key)
        if chain is None or chain.committed != len(context.tokens) - len(outcome.emitted):
            return
        grade_chain(chain.claims, outcome.emitted)
        accepted = sum(outcome.draft.drafters[row - 1] == self.name for row in outcome.path[1:])
        self._mean_accepted += _YIELD_RATE * (accepted - self._mean_accepted)

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        windows = [
            _Window(context, len(context.tokens) - 1, context.tokens[-2], 1 + len(rows_RV))
            for context, rows_RV in zip(contexts, logits, strict=True)
        ]
        self._keep(windows, torch.cat(list(logits)), first=1)

    def finish(self, context: DraftContext) -> None:
        self._chains.pop(context.key, None)
        if self._own_cache is not None:
            self._own_cache.free(context.key)

    def _chain(self, context: DraftContext, rows: int, min_score: float) -> Draft:
        """What is known of the tokens to come."""
        chain = self._chains.get(context.key)
        if chain is None or chain.committed != len(context.tokens):
            return EMPTY_DRAFT
        scores = accumulate((min(1.0, claimed * bucket.scale) for _, claimed, bucket in chain.claims[:rows]), mul)
        kept = [(token, s) for (token, _, _), s in zip(chain.claims, scores, strict=False) if s >= min_score]
        return Draft.chain(tuple(token for token, _ in kept), self.name, tuple(s for _, s in kept))

    # ---- serial ----

    def _draft(self, wanted: Sequence[tuple[DraftContext, int]]) -> None:
        """Run a window for each context, of as many slots as there may be drafts."""
        windows, slots = [], []
        for context, rows in wanted:
            count = min(rows, self._slots, self._max_context - len(context.tokens))
            window = _Window(context, len(context.tokens), context.tokens[-1], count)
            slot = self._slot(window) if count > 0 else None
            if slot is not None:
                windows.append(window)
                slots.append(slot)
        if not windows:
            return
        self._read_along(windows, slots)
        pending, auxiliary = [], []
        for window, slot, inputs_LE in zip(windows, slots, self._inputs(windows), strict=True):
            tokens, column = window.context.tokens, slot.used
            assert column + self._stands_in <= len(tokens), "the window's context is not cached"
            if column < len(tokens) - self._stands_in:
                pending.append(prompt_block(slot, column, tuple(tokens[column:]), sampled=False))
                column = len(tokens)
            sampled = tuple(range(window.slots))
            auxiliary.append(slot_block(slot, column, column, len(tokens) - 1, inputs_LE, sampled))
        self._keep(windows, self._runner.forward([*pending, *auxiliary]), first=0)

    def _slot(self, window: _Window) -> Slot | None:
        """Where the base keeps the window's context: in the target's cache, or in that of the smaller model."""
        if self._own_cache is None:
            assert window.context.slot is not None
            return window.context.slot
        return self._own_cache.slot(window.context.key, len(window.context.tokens) + window.slots)

    def _read_along(self, windows: Sequence[_Window], slots: Sequence[Slot]) -> None:
        """Let the smaller model read, for all samples together, what it has not of their contexts."""
        if self._own_cache is None:
            return
        contexts = [window.context.tokens[: len(window.context.tokens) - self._stands_in] for window in windows]
        unread = [(slot, tokens) for slot, tokens in zip(slots, contexts, strict=True) if slot.used < len(tokens)]
        if unread:
            self._own_cache.read(unread)

    # ---- one pass ----

    def _with_branches(
        self, contexts: Sequence[DraftContext], max_rows: Sequence[int], drafts: Sequence[Draft]
    ) -> list[Proposal]:
        windows: list[list[_Window]] = []
        covered = []
        for context, rows, draft in zip(contexts, max_rows, drafts, strict=True):
            depths = _likely_depths(draft.scores, self._branches) if rows else []
            slots = min(self._slots, 1 + rows)
            after = (context.tokens[-1], *draft.tokens)
            length = len(context.tokens)
            windows.append([_Window(context, length + depth, after[depth], slots) for depth, _ in depths if slots > 1])
            covered.append(sum(probability for _, probability in depths))
        inputs = iter(self._inputs([window for some in windows for window in some]))
        proposals = []
        for context, draft, some, probability in zip(contexts, drafts, windows, covered, strict=True):
            branches = tuple(
                Branch(window.target - len(context.tokens), next(inputs), self._stands_in) for window in some
            )
            proposals.append(
                Proposal(draft, None, probability * self._mean_accepted, branches) if some else EMPTY_PROPOSAL
            )
        return proposals

    # ---- both ----

    @torch.inference_mode()
    def _inputs(self, windows: Sequence[_Window]) -> list[Tensor]:
        """Inputs `[L, E]` of the slots of each window."""
        if not windows:
            return []
        device, most = self._runner.device, max(window.slots for window in windows)
        keys, indices = _flat(window.streams(0, most) for window in windows)
        u_WL = uniforms(streams(keys, indices, device)).view(len(windows), most)
        last_W = torch.tensor([window.last_token for window in windows], device=device)
        inputs_WLE = self._adapter.slot_inputs(u_WL, last_W)
        return [inputs_LE[: window.slots] for inputs_LE, window in zip(inputs_WLE, windows, strict=True)]

    def _keep(self, windows: Sequence[_Window], logits_RV: Tensor, first: int) -> None:
        """Remember the guesses of slots `first`.. of each window, from their logits."""
        if self._adapter.config.head == "c":
            guesses = self._picked(windows, logits_RV, first)
        else:
            tokens_R1, probs_R1 = top_candidates(logits_RV, 1)
            guesses = zip(tokens_R1[:, 0].tolist(), probs_R1[:, 0].tolist(), strict=True)
        for window in windows:
            slots = zip(range(first, window.slots), guesses, strict=False)
            claims = tuple((token, p, self._buckets.of(slot)[int(p * 4)]) for slot, (token, p) in slots)
            self._chains[window.context.key] = _Chain(len(window.context.tokens), claims)

    def _picked(self, windows: Sequence[_Window], logits_RV: Tensor, first: int) -> Iterator[tuple[int, float]]:
        """What the noise picks from categorical slots, and how likely that was."""
        stream_R = streams(*_flat(window.streams(first, window.slots) for window in windows), logits_RV.device)
        kinds = [window.context.sampling for window in windows for _ in range(first, window.slots)]
        guesses: list[tuple[int, float]] = [(0, 0.0)] * len(kinds)
        for kind in dict.fromkeys(kinds):
            rows = [i for i, one in enumerate(kinds) if one == kind]
            every = len(rows) == len(kinds)
            picks = pick(logits_RV if every else logits_RV[rows], kind, stream_R if every else stream_R[rows])
            likely = [1.0] * len(rows)  # Gumbel coupling tells no interval: what that is worth, outcomes will show
            if picks.low_R is not None and picks.high_R is not None:
                likely = (picks.high_R - picks.low_R).tolist()
            for row, token, probability in zip(rows, picks.token_R.tolist(), likely, strict=True):
                guesses[row] = token, probability
        return iter(guesses)


def _flat(parts: Iterable[tuple[list[NoiseKey], list[int]]]) -> tuple[list[NoiseKey], list[int]]:
    keys: list[NoiseKey] = []
    indices: list[int] = []
    for some_keys, some_indices in parts:
        keys += some_keys
        indices += some_indices
    return keys, indices


def _likely_depths(scores: Sequence[float], most: int) -> list[tuple[int, float]]:
    """The likeliest numbers of accepted drafts of a chain, at most so many, with their probabilities.

    Worked example, scores (.7, .2): 0 at .3, 1 at .5, 2 at .2; of two these are 1 and 0.
    """
    reached = (1.0, *scores, 0.0)
    exactly = [(depth, reached[depth] - reached[depth + 1]) for depth in range(len(scores) + 1)]
    return sorted(exactly, key=lambda item: -item[1])[:most]


def _warn_of_mismatch(adapter: Adapter, sampling: SamplingConfig) -> None:
    config = adapter.config
    asked = AdaptConfig.of(sampling)
    if config.head == "c" or asked == config.adapt:
        return
    trained, wanted = (_differing(a, b) for a, b in ((config.adapt, asked), (asked, config.adapt)))
    loss = ""
    if {"correct", "correct_shuffled"} <= config.metrics.keys():
        own, without = config.metrics["correct"], config.metrics["correct_shuffled"]
        loss = f": expect down to {without:.2f} correct drafts of {config.slots} instead of {own:.2f}"
    logger.warning("the adapter was trained for %s, and these samples are drawn with %s%s", trained, wanted, loss)


def _differing(adapt: AdaptConfig, other: AdaptConfig) -> str:
    values, others = adapt.model_dump(), other.model_dump()
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value != others[name])
