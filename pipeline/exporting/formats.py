"""The forms that trainers read, each a pure function from a table of output rows to a table of the data set's.

What the columns must be called, and where each was read from, is in docs/data_formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.exporting import distillkit, openai_batch
from pipeline.exporting.context import Context
from pipeline.exporting.nested import top_k
from pipeline.exporting.options import ExportOptions, FileFormat
from pipeline.schema import MESSAGES

Rows = list[dict[str, str]]

SHAREGPT = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
SHAREGPT_NAMES = {"user": "human", "assistant": "gpt"}
PROMPT = ("id", "prompt", "messages", "generation")


@dataclass(frozen=True, slots=True)
class Format:
    """`columns` of the output are read (None: all of them), `extras` of the job are needed for that.

    `ends`: only answers that came to an end make sense in it.
    """

    convert: Callable[[pa.Table, Context], pa.Table]
    natural: FileFormat
    columns: tuple[str, ...] | None
    extras: tuple[str, ...] = ()
    ends: bool = False


def messages(table: pa.Table, context: Context) -> pa.Table:
    """`messages`, the answer last: what TRL calls the conversational language modeling type."""
    return pa.table({"id": table["id"], "messages": pa.array(_conversations(table), MESSAGES)})


def prompt_completion(table: pa.Table, context: Context) -> pa.Table:
    """`prompt` and `completion`: strings, or lists of messages where the prompts are messages."""
    generations, prompts = table["generation"].to_pylist(), table["prompt"].to_pylist()
    if context.conversational:
        prompt = pa.array([_messages(*row) for row in _prompts(table)], MESSAGES)
        completion = pa.array([[_answer(text)] for text in generations], MESSAGES)
    elif any(text is None for text in prompts):
        raise ConfigError(
            "--format prompt_completion needs prompts that are all strings or all messages, got both; --format messages"
            " takes them"
        )
    else:
        prompt, completion = pa.array(prompts, pa.string()), pa.array(generations, pa.string())
    return pa.table({"id": table["id"], "prompt": prompt, "completion": completion})


def sharegpt(table: pa.Table, context: Context) -> pa.Table:
    """`conversations` of {from, value}, from human, gpt, system and what other roles there are."""
    conversations = [
        [{"from": SHAREGPT_NAMES.get(m["role"], m["role"]), "value": m["content"]} for m in conversation]
        for conversation in _conversations(table)
    ]
    return pa.table({"id": table["id"], "conversations": pa.array(conversations, SHAREGPT)})


def axolotl_kd(table: pa.Table, context: Context) -> pa.Table:
    """`messages`, and for every token of the answer the rows `logprobs` and `target_token_ids` of its top k.

    axolotl lays the rows against the end of what its chat template makes of the messages, and its loss compares the
    student at place t with row t. So row t has to be of token t + 1: one more row stands at the end, beside those for
    what the template puts behind the end token (`--trailing-tokens`). They repeat the row of the end token; the loss
    counts one of them, for what follows the end. An answer without an end token would get one from the template, so
    those that were cut off are left out.
    """
    ids, values = top_k(table["topk_token_ids"]), top_k(table["topk_logprobs"])
    times = context.trailing_tokens + 1
    return pa.table(
        {
            "id": table["id"],
            "messages": pa.array(_conversations(table), MESSAGES),
            "logprobs": values.last_repeated(times).to_arrow(),
            "target_token_ids": ids.last_repeated(times).to_arrow(),
        }
    )


def plain(table: pa.Table, context: Context) -> pa.Table:
    """All columns of the output as they are."""
    return table


FORMATS: Mapping[str, Format] = {
    "messages": Format(messages, "parquet", PROMPT),
    "prompt_completion": Format(prompt_completion, "parquet", PROMPT),
    "sharegpt": Format(sharegpt, "jsonl", PROMPT),
    "openai_batch": Format(openai_batch.convert, "jsonl", openai_batch.COLUMNS),
    "axolotl_kd": Format(axolotl_kd, "parquet", (*PROMPT, "topk_token_ids", "topk_logprobs"), ("topk",), ends=True),
    "distillkit": Format(distillkit.convert, "parquet", distillkit.COLUMNS, ("prompt_ids", "token_ids", "topk")),
    "jsonl": Format(plain, "jsonl", None),
}


def format_of(options: ExportOptions, config: JobConfig) -> Format:
    """Raises ConfigError where the job's output lacks what the format is made of."""
    found = FORMATS[options.format]
    missing = [extra for extra in found.extras if extra not in config.output.extras]
    if missing:
        raise ConfigError(
            f"--format {options.format} needs output.extras to hold {', '.join(found.extras)}, got a job with "
            f"output.extras [{', '.join(config.output.extras)}]"
        )
    return found


def _conversations(table: pa.Table) -> list[Rows]:
    generations = table["generation"].to_pylist()
    return [[*_messages(*row), _answer(text)] for row, text in zip(_prompts(table), generations, strict=True)]


def _prompts(table: pa.Table) -> Sequence[tuple[str | None, Rows | None]]:
    return list(zip(table["prompt"].to_pylist(), table["messages"].to_pylist(), strict=True))


def _messages(prompt: str | None, messages: Rows | None) -> Rows:
    """A prompt as messages; a plain string is what the user said."""
    return messages if messages is not None else [{"role": "user", "content": prompt or ""}]


def _answer(text: str | None) -> dict[str, str]:
    return {"role": "assistant", "content": text or ""}
