"""What DistillKit reads for offline distillation: token ids, and the teacher's top k for each of them, uncompressed.

DistillKit compares the student at place t with row t, and counts place t where `labels[t]` is not negative. So row t is
the teacher's distribution of token t + 1, `labels` are the token itself where there is such a row, and -100 elsewhere:
in the prompt but for its last token, at the last token of the answer, and in the padding. Rows there are uniform over
the first k ids, since no loss may become infinite where its weight is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.exporting.context import Context
from pipeline.exporting.nested import TopK, neutral, top_k

COLUMNS = ("prompt_token_ids", "completion_token_ids", "topk_token_ids", "topk_logprobs")
IGNORED = -100


def convert(table: pa.Table, context: Context) -> pa.Table:
    """Worked example: prompt [5, 6], answer [7, 8], length 5 give input_ids [5, 6, 7, 8, 0], labels [-100, 6, 7, -100,
    -100], attention_mask [1, 1, 1, 1, 0]; rows 1 and 2 are the top k of 7 and 8.
    """
    prompts = [np.asarray(ids, np.int64) for ids in table["prompt_token_ids"].to_pylist()]
    answers = [np.asarray(ids, np.int64) for ids in table["completion_token_ids"].to_pylist()]
    lengths = np.array([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], np.int64)
    widths = lengths if context.sequence_length is None else np.full(len(lengths), context.sequence_length)
    assert (lengths <= widths).all(), "longer samples were to be left out"
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    input_ids = np.zeros(starts[-1], np.int64)
    attends, has_row = np.zeros(starts[-1], bool), np.zeros(starts[-1], bool)
    for start, prompt, answer in zip(starts[:-1], prompts, answers, strict=True):
        stop = start + len(prompt) + len(answer)
        input_ids[start:stop] = np.concatenate([prompt, answer])
        attends[start:stop] = True
        has_row[start + len(prompt) - 1 : stop - 1] = True
    return pa.table(
        {
            "input_ids": _lists(starts, input_ids),
            "labels": _lists(starts, np.where(has_row, input_ids, IGNORED)),
            "attention_mask": _lists(starts, attends.astype(np.int8)),
            **_rows(table, starts, has_row),
        }
    )


def _rows(table: pa.Table, starts: NDArray[np.int64], has_row: NDArray[np.bool_]) -> dict[str, pa.ListArray]:
    """`token_ids` and `top_values`, k of them at every place."""
    given_ids, given_values = top_k(table["topk_token_ids"]), top_k(table["topk_logprobs"])
    token_ids = np.tile(np.arange(given_ids.k, dtype=np.int32), (len(has_row), 1))
    top_values = np.tile(neutral(given_values.k, given_values.values_TK), (len(has_row), 1))
    token_ids[has_row] = given_ids.values_TK
    top_values[has_row] = given_values.values_TK
    counts = np.diff(starts)
    return {"token_ids": TopK(counts, token_ids).to_arrow(), "top_values": TopK(counts, top_values).to_arrow()}


def _lists(starts: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), pa.array(values))
