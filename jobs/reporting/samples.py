"""The rows that a report shows one by one: all of them, or so many spread evenly, texts cut to a bearable length."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.reporting.stored_job import StoredJob
from pipeline.parallel import in_order
from pipeline.records import PartReceipt

MOST_ROWS = 10_000
LONGEST_TEXT = 8_000
"""Characters of a prompt or a generation."""
MOST_BYTES = 16_000_000
"""What all rows may take in the page, compressed; with the charts' library a page then stays below 20 MB."""

_COLUMNS = (
    "id",
    "sample_index",
    "prompt",
    "messages",
    "generation",
    "finish_reason",
    "error_type",
    "error",
    "prompt_tokens",
    "completion_tokens",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "latency_s",
)
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Samples:
    """`rows` of `total`, in order of shards."""

    rows: list[dict[str, Any]]
    total: int


def read_samples(job: StoredJob, most: int = MOST_ROWS) -> Samples:
    """Of all M rows the ones with number (2i + 1) M / 2N, so they are spread evenly and the same ones each time."""
    total = sum(receipt.num_rows for receipt in job.receipts)
    count = min(most, total)
    wanted = iter(sorted({(2 * i + 1) * total // (2 * count) for i in range(count)}) if count else [])
    picked: list[tuple[PartReceipt, list[int]]] = []
    first, number = 0, next(wanted, None)
    for receipt in job.receipts:
        mine = []
        while number is not None and number < first + receipt.num_rows:
            mine.append(number - first)
            number = next(wanted, None)
        if mine:
            picked.append((receipt, mine))
        first += receipt.num_rows
    rows = [row for part in in_order(lambda pick: _read(job, *pick), picked) for row in part]
    return Samples(rows, total)


def find_generations(job: StoredJob, keys: set[Key]) -> dict[Key, dict[str, Any]]:
    """The rows of another job with these ids and sample indices, as far as it has them."""
    columns = ["id", "sample_index", "generation", "completion_tokens", "num_steps"]

    def read(receipt: PartReceipt) -> list[dict[str, Any]]:
        return [row for row in job.read(receipt, columns).to_pylist() if (row["id"], row["sample_index"]) in keys]

    return {(row["id"], row["sample_index"]): row for part in in_order(read, job.receipts) for row in part}


def packed(rows: list[dict[str, Any]]) -> tuple[str, int]:
    """Rows as compressed JSON in base64, which no HTML parser takes for markup, and the length that texts were cut to:
    half of it as often as it takes to keep the page small."""
    longest = LONGEST_TEXT
    while True:
        data = json.dumps([_cut_row(row, longest) for row in rows], ensure_ascii=False, separators=(",", ":"))
        encoded = base64.b64encode(gzip.compress(data.encode("utf-8", "replace"), 6, mtime=0)).decode()
        if len(encoded) <= MOST_BYTES or longest <= 100:
            return encoded, longest
        longest //= 2


def _read(job: StoredJob, receipt: PartReceipt, indices: list[int]) -> list[dict[str, Any]]:
    columns = [*_COLUMNS, *job.copied, *(["draft_spans"] if "draft_spans" in job.columns else [])]
    table = job.read(receipt, columns).take(indices)
    return [_row(row, job, receipt.shard_index) for row in table.to_pylist()]


def _row(row: Mapping[str, Any], job: StoredJob, shard: int) -> dict[str, Any]:
    messages = row["messages"] or [{"role": "", "content": row["prompt"]}]
    shown: dict[str, Any] = {
        "id": row["id"],
        "n": row["sample_index"],
        "prompt": [[message["role"] or "", (message["content"] or "")[: LONGEST_TEXT + 1]] for message in messages],
        "text": None if row["generation"] is None else row["generation"][: LONGEST_TEXT + 1],
        "whole": hash(row["generation"]),  # to compare; it does not go into the page
        "finish": row["finish_reason"],
        "in": row["prompt_tokens"],
        "out": row["completion_tokens"],
        "steps": row["num_steps"],
        "drafted": row["num_draft_tokens"],
        "accepted": row["num_accepted_draft_tokens"],
        "s": round(row["latency_s"], 3),
        "shard": shard,
        "columns": {name: _text_of(row[name]) for name in job.copied},
    }
    if row["error_type"] is not None:
        shown |= {"error_type": row["error_type"], "error": (row["error"] or "")[:LONGEST_TEXT]}
    if row.get("draft_spans"):
        spans = row["draft_spans"]
        shown["spans"] = [[span["text_start"], span["text_length"], span["drafter"]] for span in spans]
    return shown


def _text_of(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text[:200]


def _cut_row(row: dict[str, Any], longest: int) -> dict[str, Any]:
    cut = {name: value for name, value in row.items() if name != "whole"}
    cut["prompt"] = [[role, _cut(content, longest)] for role, content in row["prompt"]]
    for name in ("text", "other"):
        if row.get(name) is not None:
            cut[name] = _cut(row[name], longest)
    return cut


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[:longest] + " […]"


def keys_of(rows: list[dict[str, Any]]) -> Iterator[Key]:
    return ((row["id"], row["n"]) for row in rows)
