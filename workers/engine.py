"""The step loop of one model replica: schedule -> draft -> forward -> pick -> verify -> commit -> observe.

Shape legend: S sampled rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from pipeline.config import DecodingConfig, EngineConfig, Windowed
from pipeline.errors import RowError
from pipeline.records import AcceptanceStats
from workers.blocks import decode_block, prompt_block
from workers.drafters.base import EMPTY_PROPOSAL, ExtraRows, Proposal, StepOutcome
from workers.drafters.build import build_drafter
from workers.kv_cache import KVCache, Move, budget_bytes, commit_move
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Request, SampleResult, Sequence
from workers.step_sampling import Candidates, PlannedBlock, pick_rows, record_extras, top_candidates
from workers.verification import accepted_path
from workers.windows import build_policy

__all__ = ["Engine", "Request", "SampleResult"]


class Engine:
    """Batched parallel decoding, in process. Not thread safe: one thread owns it.

    Outputs are a function of (model, prompt, sampling, uid, sample index) alone: strategy, batch, arrival order and
    memory decide only when a token is computed. Worked example:

        engine = Engine(load_model(ModelConfig(id="builtin:smollm2-135m")), EngineConfig(), AutoConfig())
        results = engine.generate([Request("row-1", (1, 2, 3), SamplingConfig(max_tokens=8))])
    """

    def __init__(
        self,
        model: LoadedModel,
        engine: EngineConfig,
        decoding: DecodingConfig,
        extras: frozenset[str] = frozenset(),
    ) -> None:
        self.loaded = model
        self.max_context = min(model.max_context, engine.max_context or model.max_context)
        self.extras = extras
        self.runner = ModelRunner(model.model, engine.compile)
        self.drafter = build_drafter(decoding, model, engine)
        self.policy = build_policy(decoding, self.runner.device) if isinstance(decoding, Windowed) else None
        draft_rows = decoding.max_window + decoding.extra_rows if isinstance(decoding, Windowed) else 0
        cache = KVCache(self.runner.kv_shape, budget_bytes(engine, self.runner.device), engine.max_sequences)
        self.scheduler = Scheduler(
            cache, engine.max_sequences, engine.max_tokens_per_step, draft_rows, prefix_cache=engine.prefix_cache
        )
        self.stats = AcceptanceStats()
        self._next_key = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all samples that finished since the start."""
        return self.stats.completion_tokens

    def submit(self, request: Request) -> None:
        """Queue all samples of a request.

        Raises RowError (`empty_prompt`, `prompt_too_long`) when the prompt is empty, leaves no room for one new token
        in the model's context, or needs more KV memory than there is.
        """
        length = len(request.prompt_ids)
        if length == 0:
            raise RowError("empty_prompt", "the prompt must have at least one token, got none")
        if length >= self.max_context:
            raise RowError(
                "prompt_too_long",
                f"the prompt must be shorter than the context of {self.max_context} tokens, got {length}",
            )
        samples = [self._sequence(request, i) for i in range(request.sampling.n)]
        if not self.scheduler.fits(samples[0]):
            budget = self.scheduler.cache.budget_bytes
            raise RowError(
                "prompt_too_long",
                f"prompt and output must fit into the KV memory of {budget} bytes (engine.kv_memory_gb), got {length} "
                f"prompt tokens and up to {samples[0].num_remaining} new ones",
            )
        self.scheduler.submit(samples)

    def cancel(self, uid: str) -> None:
        """Drop all unfinished samples of a request."""
        for sequence in self.scheduler.remove(uid):
            self._forget(sequence)

    def generate(self, requests: Seq[Request]) -> list[SampleResult]:
        """Run requests to their end; results in request order, samples of a request in order of their index."""
        assert not self.has_work, "generate() needs an idle engine"
        for request in requests:
            self.submit(request)
        results: list[SampleResult] = []
        while self.has_work:
            results += self.step()
        order = {request.uid: i for i, request in enumerate(requests)}
        return sorted(results, key=lambda result: (order[result.uid], result.sample_index))

    def step(self) -> list[SampleResult]:
        """One forward for everything that runs; returns the samples that ended in it."""
        plan = self._plan(self.scheduler.schedule())
        if not plan:
            return []
        logits_SV = self.runner.forward([item.block for item in plan])
        for item in plan:
            if item.proposal is None:
                item.block.slot.used += item.block.num_rows
        sampled = [item for item in plan if item.proposal is not None]
        return self._emit(sampled, logits_SV) if sampled else []

    def _sequence(self, request: Request, sample_index: int) -> Sequence:
        self._next_key += 1
        return Sequence.create(request, sample_index, self._next_key, self.loaded.eos_token_ids, self.max_context)

    def _plan(self, schedule: Schedule) -> list[PlannedBlock]:
        plan = []
        for sequence, rows in schedule.chunks:
            assert sequence.slot is not None
            start = sequence.num_cached
            last = rows == sequence.num_uncached
            block = prompt_block(sequence.slot, start, tuple(sequence.tokens[start : start + rows]), sampled=last)
            plan.append(PlannedBlock(sequence, block, EMPTY_PROPOSAL if last else None))
        for sequence, proposal in zip(schedule.decoding, self._propose(schedule), strict=True):
            assert sequence.slot is not None
            pending = sequence.tokens[-1]
            block = decode_block(sequence.slot, sequence.num_cached, pending, proposal.draft, proposal.extra)
            plan.append(PlannedBlock(sequence, block, proposal))
        return plan

    def _propose(self, schedule: Schedule) -> list[Proposal]:
        """Drafts of the decoding sequences, cut to what the sample may still emit and to what the policy buys."""
        decoding = schedule.decoding
        if self.drafter is None or self.policy is None:
            return [EMPTY_PROPOSAL] * len(decoding)
        windows = self.policy.windows([s.context.key for s in decoding], schedule.room)
        # The last token of a step is never a guess, so with one token to go there is nothing to guess.
        useful_depths = [sequence.num_remaining - 1 for sequence in decoding]
        max_rows = [window if depth else 0 for window, depth in zip(windows, useful_depths, strict=True)]
        proposed = self.drafter.propose([sequence.context for sequence in decoding], max_rows, 0.0)
        proposals = []
        for sequence, rows, depth, proposal in zip(decoding, max_rows, useful_depths, proposed, strict=True):
            assert len(proposal.draft) <= rows, (self.drafter.name, len(proposal.draft), rows)
            extra = self._within_context(sequence, proposal)
            proposals.append(Proposal(proposal.draft.up_to_depth(depth), extra, proposal.extra_yield))
        drafts = self.policy.select([p.draft for p in proposals], schedule.room)
        return [Proposal(draft, p.extra, p.extra_yield) for draft, p in zip(drafts, proposals, strict=True)]

    def _within_context(self, sequence: Sequence, proposal: Proposal) -> ExtraRows | None:
        """Extra rows, unless one lies beyond the context: there some models change the frequencies of the step."""
        extra = proposal.extra
        if extra is not None and sequence.num_cached + max(extra.offsets, default=0) >= self.max_context:
            return None
        return extra

    def _emit(self, sampled: list[PlannedBlock], logits_SV: Tensor) -> list[SampleResult]:
        """Pick, verify and commit every sampled block; returns the samples that ended."""
        picks = pick_rows(sampled, logits_SV)
        picked = picks.token_R.tolist()
        top = top_candidates(logits_SV, self.drafter.top_k) if self.drafter and self.drafter.top_k else None
        emitted, moves = [], []
        first = 0
        for item in sampled:
            tree = slice(first, first + item.tree_rows)
            path, move = self._verify(item, picked[tree])
            emitted.append((item.sequence, [first + row for row in path]))
            moves += [move] if move else []
            end = first + len(item.block.sampled)
            if self.drafter is not None:
                candidates = None if top is None else (top[0][tree], top[1][tree])
                self._observe(item, path, picked[tree], candidates, picked[tree.stop : end])
            first = end
        if self.extras & {"logprobs", "topk", "cdf"}:
            record_extras(emitted, picks, logits_SV, self.extras)
        self.scheduler.cache.commit(moves)
        return [self._finish(item.sequence) for item in sampled if item.sequence.finish_reason is not None]

    def _verify(self, item: PlannedBlock, picks: list[int]) -> tuple[tuple[int, ...], Move | None]:
        """Emit the accepted path of one block; its rows are what stays in the cache. Returns path and cache move."""
        sequence, block = item.sequence, item.block
        assert item.proposal is not None
        draft = item.proposal.draft
        if not sequence.started:
            sequence.started = True
            if self.drafter is not None:
                self.drafter.start(sequence.context)
        path = accepted_path(draft, picks)
        path = path[: sequence.emit([picks[row] for row in path], self.loaded.tokenizer)]
        sequence.stats.count(draft, path[1:])
        if block.mask_RR is None:  # a causal block: all its rows are committed tokens
            block.slot.used = block.start + block.num_rows
            return path, None
        block.slot.used = block.start + len(path)
        return path, commit_move(block.slot, block.start, path)

    def _observe(
        self,
        item: PlannedBlock,
        path: tuple[int, ...],
        picks: list[int],
        candidates: Candidates | None,
        extra: list[int],
    ) -> None:
        assert self.drafter is not None
        assert self.policy is not None
        assert item.proposal is not None
        top_tokens, top_probs = (None, None) if candidates is None else candidates
        emitted = tuple(picks[row] for row in path)
        outcome = StepOutcome(item.proposal.draft, tuple(picks), path, emitted, top_tokens, top_probs, tuple(extra))
        self.drafter.observe(item.sequence.context, outcome)
        self.policy.observe(item.sequence.context.key, item.proposal.draft, len(path) - 1)

    def _finish(self, sequence: Sequence) -> SampleResult:
        result = sequence.result(self.loaded.tokenizer, self.extras)
        self.stats = self.stats + result.stats
        self.scheduler.retire(sequence)
        self._forget(sequence)
        return result

    def _forget(self, sequence: Sequence) -> None:
        """A sample is gone: drafter and policy drop what they keep of it."""
        if sequence.started and self.drafter is not None and self.policy is not None:
            self.drafter.finish(sequence.context)
            self.policy.finish(sequence.context.key)
