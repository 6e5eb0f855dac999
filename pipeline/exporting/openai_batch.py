"""The output file of OpenAI's batch API: one line for each prompt, its samples the choices of one answer."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipeline.exporting.context import Context
from pipeline.exporting.dedup import digest
from pipeline.exporting.selection import groups

COLUMNS = (
    "id",
    "sample_index",
    "messages",
    "generation",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
)

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("refusal", pa.string())])
_CHOICE = [("index", pa.int32()), ("finish_reason", pa.string()), ("logprobs", pa.null())]
_USAGE = pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "total_tokens")])


def convert(table: pa.Table, context: Context) -> pa.Table:
    """A chat completion where the prompts are messages, else a text completion."""
    rows = table.to_pylist()
    lines = [_line(rows[start:stop], context) for start, stop in groups(table["id"].to_pylist())]
    return pa.Table.from_pylist(lines, schema=_schema(context))


def _line(samples: list[dict[str, Any]], context: Context) -> dict[str, Any]:
    uid = samples[0]["id"]
    name = digest(uid, context.model).hex()
    prompt_tokens = samples[0]["prompt_tokens"]
    completion_tokens = sum(sample["completion_tokens"] for sample in samples)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    body = {
        "id": f"chatcmpl-{name}" if context.conversational else f"cmpl-{name}",
        "object": "chat.completion" if context.conversational else "text_completion",
        "created": context.created,
        "model": context.model,
        "choices": [_choice(sample, context) for sample in samples],
        "usage": {**usage, "total_tokens": prompt_tokens + completion_tokens},
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": uid, "response": response, "error": None}


def _choice(sample: dict[str, Any], context: Context) -> dict[str, Any]:
    said = (
        {"message": {"role": "assistant", "content": sample["generation"], "refusal": None}}
        if context.conversational
        else {"text": sample["generation"]}
    )
    return {"index": sample["sample_index"], **said, "finish_reason": sample["finish_reason"], "logprobs": None}


def _schema(context: Context) -> pa.Schema:
    said = ("message", _MESSAGE) if context.conversational else ("text", pa.string())
    body = pa.struct(
        [
            ("id", pa.string()),
            ("object", pa.string()),
            ("created", pa.int64()),
            ("model", pa.string()),
            ("choices", pa.list_(pa.struct([said, *_CHOICE]))),
            ("usage", _USAGE),
        ]
    )
    response = pa.struct([("status_code", pa.int32()), ("request_id", pa.string()), ("body", body)])
    error = pa.struct([("code", pa.string()), ("message", pa.string())])
    return pa.schema([("id", pa.string()), ("custom_id", pa.string()), ("response", response), ("error", error)])
