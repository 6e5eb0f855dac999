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

import torch
from torch import Tensor

from pipeline.adapter_config import AdaptConfig
from pipeline.config import SamplingConfig
from workers.blocks import Block, prompt_block, slot_block
from workers.drafters.base import EMPTY_DRAFT, Branch, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.draft_cache import DraftCache
from workers.drafters.growth import Buckets, Claim
from workers.drafters.ptp_windows import Guesses, Window, next_windows
from workers.drafters.slot_inputs import SlotInputs
from workers.kv_cache import Slot
from workers.model_runner import ModelRunner
from workers.ptp.adapter import Adapter
from workers.randomness import NoiseKey
from workers.sampling import noise_of, pick
from workers.step_sampling import top_candidates

logger = logging.getLogger(__name__)

_YIELD_RATE = 0.02  # of the running mean of accepted drafts per step that had some


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
        idle_rows: int | None = None,
        own_cache: DraftCache | None = None,
    ) -> None:
        """`runner` runs the adapter's base, up to position `max_context`. With `branches` > 0 drafting and verifying
        are one pass: so many for each sample, or fewer, but one, where all of them together would take more than
        `idle_rows`. With `own_cache` the base is not the target but a smaller model that reads along.
        """
        self._adapter = adapter
        self._runner = runner
        self._max_context = max_context
        self._branches = branches
        self._idle_rows = idle_rows
        self._own_cache = own_cache
        self._inputs = SlotInputs(adapter, runner)
        self._slots = adapter.config.slots
        self._stands_in = int(adapter.config.slot_zero == "context_token")  # slot 0 takes the last token's place
        self._guesses: dict[int, Guesses] = {}
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
        wanted = zip(contexts, max_rows, strict=True)
        self._draft([(context, rows) for context, rows in wanted if rows and self._is_serial(context)])
        drafts = [
            self._known(context, rows, min_score) if rows else EMPTY_DRAFT
            for context, rows in zip(contexts, max_rows, strict=True)
        ]
        if not self._branches:
            return [Proposal(draft) for draft in drafts]
        return self._with_branches(contexts, max_rows, drafts)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        guesses = self._guesses.get(context.key)
        if guesses is None or guesses.committed != len(context.tokens) - len(outcome.emitted):
            return
        guesses.grade(outcome.emitted, context.noise_sets[-len(outcome.emitted) :])
        accepted = sum(outcome.draft.drafters[row - 1] == self.name for row in outcome.path[1:])
        self._mean_accepted += _YIELD_RATE * (accepted - self._mean_accepted)

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        windows = [
            Window(context, len(context.tokens) - 1, context.tokens[-2], 1 + len(rows_RV))
            for context, rows_RV in zip(contexts, logits, strict=True)
        ]
        self._keep(windows, torch.cat(list(logits)), first=1)

    def finish(self, context: DraftContext) -> None:
        self._guesses.pop(context.key, None)
        if self._own_cache is not None:
            self._own_cache.free(context.key)

    def _known(self, context: DraftContext, rows: int, min_score: float) -> Draft:
        """What is known of the tokens to come."""
        guesses = self._guesses.get(context.key)
        if guesses is None or guesses.committed != len(context.tokens):
            return EMPTY_DRAFT
        return guesses.draft(rows, min_score, self.name, context.sampling.noise_sets)

    def _is_serial(self, context: DraftContext) -> bool:
        """A branch would need a window for each number of accepted drafts and each set of noise."""
        return not self._branches or context.sampling.chooses_noise

    # ---- serial ----

    def _draft(self, wanted: Sequence[tuple[DraftContext, int]]) -> None:
        """Run windows for each context, of as many slots together as there may be drafts."""
        parts: list[tuple[Slot, list[Window]]] = []
        for context, rows in wanted:
            windows = next_windows(context, rows, min(self._slots, self._max_context - len(context.tokens)))
            slot = self._slot(context, sum(window.slots for window in windows)) if windows else None
            if slot is not None:
                parts.append((slot, windows))
        if not parts:
            return
        unread, auxiliary = self._unread(parts), []
        windows = [window for _, some in parts for window in some]
        inputs = iter(self._inputs(windows))
        for slot, some in parts:
            length = len(some[0].context.tokens)
            seen = start = length - self._stands_in
            for window in some:
                sampled = tuple(range(window.slots))
                auxiliary.append(slot_block(slot, start, seen, length - 1, next(inputs), sampled))
                start += window.slots
        self._keep(windows, self._runner.forward([*unread, *auxiliary]), first=0)

    def _unread(self, parts: Sequence[tuple[Slot, Sequence[Window]]]) -> list[Block]:
        """What the base has not read of contexts: the last token, which the target reads again in the step, or what a
        smaller model has to read along.
        """
        contexts = [(slot, some[0].context.tokens[: some[0].target - self._stands_in]) for slot, some in parts]
        items = [(slot, known) for slot, known in contexts if slot.used < len(known)]
        if self._own_cache is not None:
            return self._own_cache.unread(items)
        assert all(slot.used + 1 == len(known) for slot, known in items), "the window's context is not cached"
        return [prompt_block(slot, slot.used, (known[-1],), sampled=False) for slot, known in items]

    def _slot(self, context: DraftContext, rows: int) -> Slot | None:
        """Where the base keeps the context: in the target's cache, or in that of the smaller model."""
        if self._own_cache is None:
            assert context.slot is not None
            return context.slot
        return self._own_cache.slot(context.key, len(context.tokens) + rows)

    # ---- one pass ----

    def _with_branches(
        self, contexts: Sequence[DraftContext], max_rows: Sequence[int], drafts: Sequence[Draft]
    ) -> list[Proposal]:
        windows: list[list[tuple[Window, float]]] = []
        most = self._branches
        if self._idle_rows is not None:
            slots = min(self._slots, 1 + max(max_rows))
            most = max(1, min(most, self._idle_rows // (slots * len(contexts))))
        for context, rows, draft in zip(contexts, max_rows, drafts, strict=True):
            slots = min(self._slots, 1 + rows)
            branching = slots > 1 and not self._is_serial(context)
            depths = _likely_depths(draft.scores, most) if branching else []
            after = (context.tokens[-1], *draft.tokens)
            length = len(context.tokens)
            windows.append([(Window(context, length + depth, after[depth], slots), p) for depth, p in depths])
        inputs = iter(self._inputs([window for some in windows for window, _ in some]))
        proposals = []
        for context, draft, some in zip(contexts, drafts, windows, strict=True):
            branches = [
                Branch(window.target - len(context.tokens), next(inputs), self._stands_in, chance * self._mean_accepted)
                for window, chance in some
            ]
            proposals.append(Proposal(draft, branches=tuple(branches)))
        return proposals

    # ---- both ----

    def _keep(self, windows: Sequence[Window], logits_RV: Tensor, first: int) -> None:
        """Remember the guesses of slots `first`.. of each window, from their logits."""
        if self._adapter.config.head == "c":
            guesses = self._picked(windows, logits_RV, first)
        else:
            tokens_R1, probs_R1 = top_candidates(logits_RV, 1)
            guesses = zip(tokens_R1[:, 0].tolist(), probs_R1[:, 0].tolist(), strict=True)
        chains: dict[int, list[tuple[Claim, ...]]] = {}
        for window in windows:
            slots = zip(range(first, window.slots), guesses, strict=False)
            claims = tuple((token, p, self._buckets.of(slot)[int(p * 4)]) for slot, (token, p) in slots)
            chains.setdefault(window.context.key, []).append(claims)
        for context in {window.context.key: window.context for window in windows}.values():
            choice = context.until_choice if context.sampling.chooses_noise else None
            self._guesses[context.key] = Guesses(len(context.tokens), tuple(chains[context.key]), choice)

    def _picked(self, windows: Sequence[Window], logits_RV: Tensor, first: int) -> Iterator[tuple[int, float]]:
        """What the noise picks from categorical slots, and how likely that was."""
        stream_R = noise_of(*_flat(window.streams(first, window.slots) for window in windows), logits_RV)
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
