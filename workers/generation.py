"""What `sevenleague.Engine` gives for a prompt: its samples, or an error in the place of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.config import JobConfig
from pipeline.errors import RowError
from pipeline.prompts import Prompt
from pipeline.records import AcceptanceStats, FinishReason
from workers.in_flight import ResultFuture


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample of one prompt, or the error that took its place (then `text` is None and there are no tokens).

    `prompt_index` is the place of the prompt among those given. The optional lists have one entry per token id and are
    there when the engine was made with the extra of that name. Names are those of an output's columns.
    """

    id: str
    prompt_index: int
    sample_index: int
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    latency_s: float = 0.0
    error_type: str | None = None
    error: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    topk_token_ids: tuple[tuple[int, ...], ...] | None = None
    topk_logprobs: tuple[tuple[float, ...], ...] | None = None
    cdf_low: tuple[float, ...] | None = None
    cdf_high: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class GenerateProgress:
    """How far a call of `generate` is. Samples that failed count as done."""

    done: int
    total: int
    completion_tokens: int
    elapsed_s: float


def generations_of(prompt: Prompt, prompt_tokens: int, future: ResultFuture, config: JobConfig) -> Iterator[Generation]:
    try:
        samples = future.result()
    except RowError as error:
        yield from failed_generations(prompt, error, config)
        return
    for sample in samples:
        yield Generation(
            id=prompt.uid,
            prompt_index=prompt.row,
            sample_index=sample.sample_index,
            text=sample.text,
            token_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            prompt_tokens=prompt_tokens,
            stats=sample.stats,
            latency_s=sample.latency_s,
            token_logprobs=sample.token_logprobs,
            topk_token_ids=sample.topk_token_ids,
            topk_logprobs=sample.topk_logprobs,
            cdf_low=sample.cdf_low,
            cdf_high=sample.cdf_high,
        )


def failed_generations(prompt: Prompt, error: RowError, config: JobConfig) -> Iterator[Generation]:
    """The error in the place of every sample of a prompt."""
    for i in range(config.sampling.n):
        yield Generation(prompt.uid, prompt.row, i, None, (), "error", error_type=error.error_type, error=str(error))
