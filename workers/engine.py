"""The step loop of one model replica: schedule -> draft -> forward -> pick -> verify -> commit -> observe.

Shape legend: S sampled rows of a step, A those of auxiliary branches, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pipeline.config import EngineConfig
from pipeline.decoding_config import DecodingConfig, Windowed
from pipeline.errors import RowError
from pipeline.records import AcceptanceStats
from workers.blocks import decode_block, prompt_block
from workers.drafters.base import EMPTY_PROPOSAL, Proposal
from workers.drafters.build import adapter_of
from workers.kv_cache import Move, budget_bytes, commit_move
from workers.lockstep import new_runner
from workers.memory_faults import FEWEST_TOKENS_PER_STEP, admission
from workers.model_loading import LoadedModel
from workers.native import sampling as native_sampling
from workers.occupancy import OccupancyCounts
from workers.planned_block import PlannedBlock, branch_blocks
from workers.sampling import Picks
from workers.scheduler import Schedule, Scheduler
from workers.sequence import Request, SampleResult, Sequence
from workers.speculation import build_speculation
from workers.step_sampling import Candidates, pick_rows, picks_the_best, record_extras, top_candidates
from workers.tracing import TracingCounter
from workers.verification import accepted_path

__all__ = ["Engine", "Request", "SampleResult"]

MAX_STEP_TIMES = 256
"""Times of the last steps that are kept for whoever asks."""


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
        halvings: int = 0,
    ) -> None:
        """`halvings`: how often the device's memory ran out before; each time the engine takes on half as much."""
        self.loaded = model
        self.max_context = min(model.max_context, engine.max_context or model.max_context)
        self.extras = extras
        self.runner = new_runner(model, engine.compile, adapter_of(decoding, model))
        self._compiled = engine.compile != "off"
        if self._compiled:
            native_sampling.serves(torch.empty(0, 1, dtype=model.model.dtype, device=self.runner.device))  # built now
        limits = admission(engine, halvings)
        self.is_smallest = limits.max_sequences == 1 and limits.max_tokens_per_step <= FEWEST_TOKENS_PER_STEP
        self.speculation = build_speculation(decoding, model, limits, self.runner, self.max_context)
        draft_rows = decoding.max_window + decoding.extra_rows if isinstance(decoding, Windowed) else 0
        kv_bytes = budget_bytes(engine, self.runner.device)
        cache = self.runner.new_cache(max(1, kv_bytes >> halvings), limits.max_sequences, limit_bytes=kv_bytes)
        self.scheduler = Scheduler(
            cache, limits.max_sequences, limits.max_tokens_per_step, draft_rows, prefix_cache=engine.prefix_cache
        )
        self.stats = AcceptanceStats()
        self.occupancy = OccupancyCounts()
        self.step_seconds: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self.stepped_at = time.perf_counter()
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
            budget = self.scheduler.cache.limit_bytes
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
        began = time.perf_counter()
        schedule = self.scheduler.schedule()
        plan = self._plan(schedule)
        if not plan:
            return []
        forward_began = time.perf_counter()
        branches = [block for item in plan for block in branch_blocks(item)]
        logits_SV = logits_AV = self.runner.forward([item.block for item in plan] + branches)
        if branches:
            logits_SV, logits_AV = logits_SV.tensor_split([sum(len(item.block.sampled) for item in plan)])
        for item in plan:
            if item.proposal is None:
                item.block.slot.used += item.block.num_rows
        sampled = [item for item in plan if item.proposal is not None]
        picks, top = self._pick(sampled, logits_SV) if sampled else (None, None)
        picked = [] if picks is None else picks.token_R.tolist()  # waits for the device
        forward_s = time.perf_counter() - forward_began
        before = [len(sequence.tokens) for sequence in schedule.decoding]
        results = [] if picks is None else self._emit(sampled, picks, picked, logits_SV, top)
        if branches and self.speculation is not None:
            accepted = [len(s.tokens) - n - 1 for s, n in zip(schedule.decoding, before, strict=True)]
            self.speculation.read_branches(plan[-len(accepted) :], accepted, logits_AV)
        emitted = sum(len(s.tokens) - n for s, n in zip(schedule.decoding, before, strict=True))
        if self.speculation is not None:
            self.speculation.measured(len(picked), emitted, forward_s, time.perf_counter() - began)
        if before:
            self.occupancy.count(len(before), self.speculation.draft_rows if self.speculation else 0, emitted)
        self.stepped_at = time.perf_counter()
        self.step_seconds.append(self.stepped_at - began)
        return results

    def _sequence(self, request: Request, sample_index: int) -> Sequence:
        self._next_key += 1
        end_ids = self.loaded.eos_token_ids
        sequence = Sequence.create(request, sample_index, self._next_key, end_ids, self.max_context)
        if "trace" in self.extras:
            sequence.stats = TracingCounter()
        return sequence

    def _plan(self, schedule: Schedule) -> list[PlannedBlock]:
        plan = []
        for sequence, rows in schedule.chunks:
            assert sequence.slot is not None
            start = sequence.num_cached
            last = rows == sequence.num_uncached
            block = prompt_block(sequence.slot, start, tuple(sequence.tokens[start : start + rows]), sampled=last)
            plan.append(PlannedBlock(sequence, block, EMPTY_PROPOSAL if last else None))
        proposals: list[Proposal] = [EMPTY_PROPOSAL] * len(schedule.decoding)
        if self.speculation is not None:
            proposals = self.speculation.propose(schedule, self.scheduler)
        for sequence, proposal in zip(schedule.decoding, proposals, strict=True):
            assert sequence.slot is not None
            pending = sequence.tokens[-1]
            block = decode_block(sequence.slot, sequence.num_cached, pending, proposal.draft, proposal.extra)
            plan.append(PlannedBlock(sequence, block, proposal))
        return plan

    def _pick(self, sampled: list[PlannedBlock], logits_SV: Tensor) -> tuple[Picks, Candidates | None]:
        """The picks of a step, and the drafter's candidates if it wants some, which begin with greedy picks."""
        k = 0 if self.speculation is None else self.speculation.top_k
        if k and self._compiled and picks_the_best(sampled) and native_sampling.serves(logits_SV):
            top = top_candidates(logits_SV, k)
            return Picks(torch.from_numpy(top[0][:, 0])), top
        picks = pick_rows(sampled, logits_SV, compiled=self._compiled)
        return picks, top_candidates(logits_SV, k, compiled=self._compiled) if k else None

    def _emit(
        self,
        sampled: list[PlannedBlock],
        picks: Picks,
        picked: list[int],
        logits_SV: Tensor,
        top: Candidates | None,
    ) -> list[SampleResult]:
        """Verify and commit every sampled block; returns the samples that ended. `top` are the drafter's candidates."""
        speculation = self.speculation
        emitted, moves = [], []
        first = 0
        for item in sampled:
            tree = slice(first, first + item.tree_rows)
            path, move = self._verify(item, picked[tree])
            emitted.append((item.sequence, [first + row for row in path]))
            moves += [move] if move else []
            if picks.sets:
                item.sequence.context.noise_sets += [picks.sets[first + row] for row in path]
            end = first + len(item.block.sampled)
            if speculation is not None:
                candidates = None if top is None else (top[0][tree], top[1][tree])
                speculation.observe(item, path, picked[tree], candidates, picked[tree.stop : end])
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
            if self.speculation is not None:
                self.speculation.start(sequence)
        path = accepted_path(draft, picks)
        path = path[: sequence.emit([picks[row] for row in path], self.loaded.tokenizer)]
        sequence.stats.count(draft, path[1:])
        if block.mask_RR is None:  # a causal block: all its rows are committed tokens
            block.slot.used = block.start + block.num_rows
            return path, None
        block.slot.used = block.start + len(path)
        return path, commit_move(block.slot, block.start, path)

    def _finish(self, sequence: Sequence) -> SampleResult:
        result = sequence.result(self.loaded.tokenizer, self.extras)
        self.stats = self.stats + result.stats
        self.scheduler.retire(sequence)
        self._forget(sequence)
        return result

    def _forget(self, sequence: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.finish(sequence)
