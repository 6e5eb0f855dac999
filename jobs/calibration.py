"""Measurements before a job is paid for: prompt lengths of a sample of its rows, and a few seconds of decoding.

The lengths need a tokenizer and no weights. What is measured on this machine says nothing of other machines.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from jobs.estimate import Calibration, PromptFigures
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, RowError
from pipeline.parts import encode_table
from pipeline.prompts import Prompt, read_prompts
from pipeline.records import SampleRecord
from pipeline.schema import output_schema, to_row
from pipeline.shards import Plan
from workers.actor import worker_threads
from workers.engine import Engine, Request, SampleResult
from workers.model_loading import LoadedModel, load_model
from workers.rendering import Renderer, make_renderer
from workers.sample_records import sample_record

SAMPLED_ROWS, SAMPLED_SHARDS = 1024, 16
CALIBRATION_S = 20.0
WARM_UP_TOKENS = 8
_WARM_UP = "(warm-up)"
_NO_LIMIT = 2**62


def sampled_prompts(config: JobConfig, plan: Plan) -> list[Prompt]:
    """Prompts of about a thousand rows, from the beginnings of shards that are spread evenly over the plan."""
    count = min(SAMPLED_SHARDS, len(plan.shards))
    shards = [plan.shards[(2 * i + 1) * len(plan.shards) // (2 * count)] for i in range(count)]
    rows = -(-SAMPLED_ROWS // count)
    return [
        prompt for shard in shards for prompt in islice(read_prompts(shard, config.input, config.output.columns), rows)
    ]


def measure_prompts(
    config: JobConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, longest: int
) -> PromptFigures:
    """Render and tokenize prompts for a model of so long a context."""
    outcomes = Renderer(tokenizer, config.input, _NO_LIMIT).batch_token_ids(prompts, config.sampling.max_tokens)
    errors = Counter(outcome.error_type for outcome in outcomes if isinstance(outcome, RowError))
    lengths = tuple(len(outcome) for outcome in outcomes if not isinstance(outcome, RowError))
    return PromptFigures(len(prompts), lengths, dict(errors), min(longest, config.engine.max_context or longest))


def calibrate(config: JobConfig, plan: Plan, prompts: Sequence[Prompt], limit_s: float = CALIBRATION_S) -> Calibration:
    """Decode sampled prompts with the job's settings and a full batch, until the time is up or all are done.

    Loading and warming up are not timed. Raises ConfigError where no prompt can be served.
    """
    torch.set_num_threads(worker_threads(config))
    loaded = load_model(config.model)
    engine = Engine(loaded, config.engine, config.decoding, config.output.recorded)
    waiting = deque(_requests(make_renderer(loaded, config), config, prompts))
    if not waiting:
        raise ConfigError(f"a calibration must have a prompt that can be served, got none in {len(prompts)} rows")
    warm_up = waiting[0][0].sampling.model_copy(update={"n": 1, "max_tokens": WARM_UP_TOKENS})
    engine.generate([replace(waiting[0][0], uid=_WARM_UP, sampling=warm_up)])
    before = engine.completion_tokens
    submitted: dict[str, tuple[Prompt, tuple[int, ...]]] = {}
    results: list[SampleResult] = []
    began = time.perf_counter()
    while (waiting or engine.has_work) and time.perf_counter() - began < limit_s:
        while waiting and engine.num_running + engine.num_waiting < config.engine.max_sequences:
            request, prompt = waiting.popleft()
            submitted[request.uid] = prompt, request.prompt_ids
            engine.submit(request)
        results += engine.step()
    seconds = time.perf_counter() - began
    stats = sum((sequence.stats.freeze() for sequence in engine.scheduler.running), engine.stats)
    records = [sample_record(*submitted[result.uid], result) for result in results]
    return Calibration(
        seconds=seconds,
        tokens=stats.completion_tokens - before,
        num_finished=len(results),
        num_bytes=_size_as_parquet(records, config, plan, loaded.revision),
        tokens_per_step=stats.mean_acceptance_length,
        machine=_machine(loaded, config),
    )


def _requests(renderer: Renderer, config: JobConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[Request, Prompt]]:
    outcomes = renderer.batch_token_ids(prompts, config.sampling.max_tokens)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if not isinstance(outcome, RowError):
            yield Request(prompt.uid, outcome, prompt.sampled_by(config.sampling)), prompt


def _size_as_parquet(records: Sequence[SampleRecord], config: JobConfig, plan: Plan, revision: str) -> int:
    rows = [to_row(record, config, revision) for record in records]
    return len(encode_table(pa.Table.from_pylist(rows, schema=output_schema(config, plan.passthrough))))


def _machine(loaded: LoadedModel, config: JobConfig) -> str:
    device = loaded.model.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this CPU with {worker_threads(config)} threads"
