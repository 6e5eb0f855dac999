"""The output rows that a prompt gives: one for each sample, or the error that took its place."""

from __future__ import annotations

import json
from typing import Any

from pipeline.errors import RowError
from pipeline.prompts import Prompt
from pipeline.records import AcceptanceStats, SampleRecord
from pipeline.redaction import redacted
from workers.engine import SampleResult
from workers.tracing import placed_in_text


def sample_record(prompt: Prompt, prompt_token_ids: tuple[int, ...], result: SampleResult) -> SampleRecord:
    """The output row of a finished sample."""
    text, spans = result.text, result.draft_spans
    return SampleRecord(
        id=prompt.uid,
        sample_index=result.sample_index,
        prompt=prompt.prompt,
        messages=prompt.messages,
        generation=text,
        finish_reason=result.finish_reason,
        error_type=None,
        error=None,
        prompt_tokens=len(prompt_token_ids),
        completion_tokens=len(result.token_ids),
        stats=result.stats,
        latency_s=result.latency_s,
        passthrough=prompt.passthrough,
        prompt_token_ids=prompt_token_ids,
        completion_token_ids=result.token_ids,
        token_logprobs=result.token_logprobs,
        topk_token_ids=result.topk_token_ids,
        topk_logprobs=result.topk_logprobs,
        cdf_low=result.cdf_low,
        cdf_high=result.cdf_high,
        draft_spans=None if spans is None else placed_in_text(spans, result.token_ids, text, result.tokenizer),
        **_row_settings(prompt),
    )


def error_record(prompt: Prompt, sample_index: int, error: RowError) -> SampleRecord:
    """The output row of a sample that failed: the prompt as far as it could be read, and zero counts."""
    return SampleRecord(
        id=prompt.uid,
        sample_index=sample_index,
        prompt=prompt.prompt,
        messages=prompt.messages,
        generation=None,
        finish_reason="error",
        error_type=error.error_type,
        error=redacted(str(error)),
        prompt_tokens=0,
        completion_tokens=0,
        stats=AcceptanceStats(),
        latency_s=0.0,
        passthrough=prompt.passthrough,
        **_row_settings(prompt),
    )


def _row_settings(prompt: Prompt) -> dict[str, Any]:
    """What the row asked for itself, as its output rows tell it."""
    return {
        "seed": prompt.sampling.get("seed"),
        "sampling": prompt.sampling or None,
        "tools": None if prompt.tools is None else json.dumps(prompt.tools, ensure_ascii=False),
    }
