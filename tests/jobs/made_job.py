"""Outputs of jobs as drivers and workers write them, with rows and times that a test chooses; no model, no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.commits import JobStore
from pipeline.config_io import parse_job
from pipeline.parts import write_part
from pipeline.records import AcceptanceStats, DraftSpan, OccupancyClass, SampleRecord, Shard, ShardTask
from pipeline.shards import Plan

BEGAN = 1_800_000_000.0
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def row(number: int, **changes: Any) -> SampleRecord:
    """Ten tokens in 4 steps, drafts of suffix and of recycling among them."""
    text = f"Answer {number}: seven leagues at one step, and no more."
    stats = AcceptanceStats(4, 12, 6, (0, 2, 2), (0, 0, 0, 4), {"suffix": 4, "recycling": 2})
    fields: dict[str, Any] = {
        "id": f"row-{number}",
        "sample_index": 0,
        "prompt": f"Question {number}?",
        "messages": None,
        "generation": text,
        "finish_reason": "length",
        "error_type": None,
        "error": None,
        "prompt_tokens": 4 + number % 50,
        "completion_tokens": 10,
        "stats": stats,
        "latency_s": 0.5,
        "passthrough": {"task": ("math", "chat", "code")[number % 3]},
        "draft_spans": (DraftSpan(0, 2, "suffix", 0, 6), DraftSpan(3, 1, "recycling", 10, 5)),
    }
    return SampleRecord(**{**fields, **changes})


def failed_row(number: int, error_type: str = "prompt_too_long", **changes: Any) -> SampleRecord:
    error = {
        "generation": None,
        "finish_reason": "error",
        "error_type": error_type,
        "error": "the prompt is longer than the context",
        "completion_tokens": 0,
        "stats": AcceptanceStats(),
        "draft_spans": None,
    }
    return row(number, **{**error, **changes})


def make_output(
    output: Path,
    rows: Sequence[SampleRecord],
    *,
    rows_per_shard: int = 4,
    committed: int | None = None,
    finish: bool = True,
    timed: bool = True,
    decoding: str = "auto",
    gpus: float = 0,
    trace: bool = True,
) -> JobStore:
    """Two workers take turns, two seconds a shard. Shard 2 takes five times as long; shard 3 is a second attempt, by a
    process that took another's place. After half of the shards the job was away for an hour."""
    config = parse_job(
        {
            "model": "builtin:smollm2-135m",
            "input": "prompts.parquet",
            "output": {"path": str(output), "columns": ["task"], "rows_per_shard": rows_per_shard, "trace": trace}
            | {"extras": []},
            "decoding": decoding,
            "cluster": {"workers": 2, "gpus_per_worker": gpus},
        }
    )
    starts = range(0, len(rows), rows_per_shard)
    shards = tuple(Shard(i, "in", at, min(rows_per_shard, len(rows) - at)) for i, at in enumerate(starts))
    passthrough = pa.schema([("task", pa.string())])
    store = JobStore(str(output))
    store.create_or_resume(config, Plan(shards, (), len(rows), passthrough), "revision")
    for shard in shards[:committed]:
        is_late = shard.index >= len(shards) // 2
        run = "second" if is_late else "first"
        task = ShardTask(shard, 2 if shard.index == 3 else 1, run, str(output), passthrough)
        records = rows[shard.start_row : shard.start_row + shard.num_rows]
        seconds = 10.0 if shard.index == 2 else 2.0
        receipt = write_part(task, records, config, "revision", f"worker-{shard.index % 2}", seconds)
        if timed:
            began = BEGAN + 2.0 * (shard.index // 2) + 3600.0 * is_late
            is_second = shard.index >= 3 and shard.index % 2
            worker_began = BEGAN + (3600.0 + len(shards) // 4 * 2.0 if is_late else 1.0 if is_second else -5.0)
            occupancy = (OccupancyClass(1, 3, 3, 24, 9), OccupancyClass(2, 10, 25, 50, 25))
            receipt = dataclasses.replace(receipt, began=began, worker_began=worker_began, occupancy=occupancy)
        store.commit(receipt)
    if finish:
        store.finish(config, store.committed().values(), {})
    else:
        store.set_state("running", "run")
    return store
