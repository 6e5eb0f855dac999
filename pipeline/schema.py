"""The Arrow schema of the output: explicit, so that every part has the same whatever its rows hold.

`acceptance_histogram[j]` counts the steps that accepted exactly j draft tokens, `window_histogram[j]` those that
drafted j. `accepted_by_drafter` is a list of pairs rather than an Arrow map, which `datasets` cannot read. Columns that
the user copies from the input (`output.columns`) keep their Arrow types and come last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.data_config import InputConfig
from pipeline.records import AcceptanceStats, SampleRecord
from pipeline.redaction import without_credentials

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

_BASE = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("messages", MESSAGES),
        pa.field("generation", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error_type", pa.string()),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("model_revision", pa.string()),
        pa.field("num_steps", pa.int32(), nullable=False),
        pa.field("num_draft_tokens", pa.int32(), nullable=False),
        pa.field("num_accepted_draft_tokens", pa.int32(), nullable=False),
        pa.field("mean_acceptance_length", pa.float64(), nullable=False),
        pa.field("draft_acceptance_rate", pa.float64(), nullable=False),
        pa.field("acceptance_histogram", pa.list_(pa.int32()), nullable=False),
        pa.field("window_histogram", pa.list_(pa.int32()), nullable=False),
        pa.field("accepted_by_drafter", pa.list_(pa.struct([("drafter", pa.string()), ("accepted", pa.int32())]))),
        pa.field("latency_s", pa.float64(), nullable=False),
    ]
)

_EXTRAS: Mapping[str, Sequence[tuple[str, pa.DataType]]] = {
    "prompt_ids": [("prompt_token_ids", pa.list_(pa.int32()))],
    "token_ids": [("completion_token_ids", pa.list_(pa.int32()))],
    "logprobs": [("token_logprobs", pa.list_(pa.float32()))],
    "topk": [
        ("topk_token_ids", pa.list_(pa.list_(pa.int32()))),
        ("topk_logprobs", pa.list_(pa.list_(pa.float32()))),
    ],
    "cdf": [("cdf_low", pa.list_(pa.float64())), ("cdf_high", pa.list_(pa.float64()))],
}

_TOPK_TYPES = {"float32": pa.float32(), "float16": pa.float16()}

TRACE = pa.field(
    "draft_spans",
    pa.list_(
        pa.struct(
            [
                ("start", pa.int32()),
                ("length", pa.int32()),
                ("drafter", pa.string()),
                ("text_start", pa.int32()),
                ("text_length", pa.int32()),
            ]
        )
    ),
)

SAMPLING = pa.field(
    "sampling",
    pa.struct(
        [
            ("temperature", pa.float64()),
            ("top_p", pa.float64()),
            ("top_k", pa.int64()),
            ("min_p", pa.float64()),
            ("max_tokens", pa.int64()),
            ("stop", pa.list_(pa.string())),
            ("seed", pa.int64()),
        ]
    ),
)
TOOLS = pa.field("tools", pa.string())

OUTPUT_COLUMNS = frozenset([*_BASE.names, *(name for columns in _EXTRAS.values() for name, _ in columns), TRACE.name])
"""Names that no column copied from the input may take."""


def settings_schema(config: InputConfig) -> list[pa.Field]:
    """What rows asked for themselves, in jobs where they may (`seed` tells of seeds)."""
    return [SAMPLING] * (config.sampling_column is not None) + [TOOLS] * (config.tools_column is not None)


def output_schema(config: JobConfig, passthrough: pa.Schema) -> pa.Schema:
    """Schema of the parts of a job: the columns of every output, the extras asked for, the copied ones."""
    kinds = {"topk_logprobs": pa.list_(pa.list_(_TOPK_TYPES[config.output.topk_dtype]))}
    extras = [pa.field(name, kinds.get(name, kind)) for extra in config.output.extras for name, kind in _EXTRAS[extra]]
    trace = [TRACE] if config.output.trace else []
    return pa.schema([*_BASE, *extras, *trace, *settings_schema(config.input), *passthrough])


def to_row(record: SampleRecord, config: JobConfig, model_revision: str) -> dict[str, Any]:
    """One record as a row of `output_schema`."""
    stats = record.stats
    row: dict[str, Any] = {
        **record.passthrough,
        "id": record.id,
        "sample_index": record.sample_index,
        "prompt": record.prompt,
        "messages": record.messages,
        "generation": record.generation,
        "finish_reason": record.finish_reason,
        "error_type": record.error_type,
        "error": record.error,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "seed": config.sampling.seed if record.seed is None else record.seed,
        "model": without_credentials(config.model.id),
        "model_revision": model_revision,
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": stats.acceptance_histogram,
        "window_histogram": stats.window_histogram,
        "accepted_by_drafter": [{"drafter": k, "accepted": v} for k, v in sorted(stats.accepted_by_drafter.items())],
        "latency_s": record.latency_s,
    }
    for extra in config.output.extras:
        row |= {name: getattr(record, name) for name, _ in _EXTRAS[extra]}
    if config.output.trace:
        spans = record.draft_spans
        row[TRACE.name] = None if spans is None else [dataclasses.asdict(span) for span in spans]
    row |= {field.name: getattr(record, field.name) for field in settings_schema(config.input)}
    return row


def stats_of(row: Mapping[str, Any]) -> AcceptanceStats:
    """The counts of one output row; their invariants are asserted on the way."""
    return AcceptanceStats(
        num_steps=row["num_steps"],
        num_draft_tokens=row["num_draft_tokens"],
        num_accepted_draft_tokens=row["num_accepted_draft_tokens"],
        acceptance_histogram=tuple(row["acceptance_histogram"]),
        window_histogram=tuple(row["window_histogram"]),
        accepted_by_drafter={pair["drafter"]: pair["accepted"] for pair in row["accepted_by_drafter"]},
    )


STATS_COLUMNS = (
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "acceptance_histogram",
    "window_histogram",
    "accepted_by_drafter",
)
