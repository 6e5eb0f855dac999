"""Finished outputs of given rows, made by the code that makes real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config_io import parse_job
from pipeline.parts import write_part
from pipeline.preparation import prepare
from pipeline.records import AcceptanceStats, SampleRecord, ShardTask
from tests.pipeline.makers import make_record, write_parquet


def make_output(
    folder: Path,
    records: Sequence[SampleRecord],
    *,
    output: str = "",
    n: int = 1,
    unfinished: bool = False,
    extras: Sequence[str] = ("token_ids",),
    rows_per_shard: int = 2,
    topk_dtype: str = "float32",
) -> str:
    """The path of an output of `n` samples for each prompt, in parts of `rows_per_shard` prompts.

    `unfinished`: without the last part, and with a part that no commit names.
    """
    prompts = write_parquet(folder / "in.parquet", {"prompt": [f"{i}" for i in range(len(records) // n)]})
    job = {
        "model": {"id": "tiny", "dtype": "float32"},
        "input": prompts,
        "output": {"path": output or str(folder / "out"), "rows_per_shard": rows_per_shard, "extras": list(extras)},
        "sampling": {"n": n, "logprobs": 2, "temperature": 0.7},
        "decoding": "suffix",
    }
    prepared = prepare(parse_job(job, [f"output.topk_dtype={topk_dtype}"]))
    store = JobStore(prepared.config.output.path)
    store.create_or_resume(prepared.config, prepared.plan, "revision-1")
    for shard in prepared.plan.shards[: -1 if unfinished else None]:
        task = ShardTask(shard, 1, "run", store.output, prepared.plan.passthrough)
        mine = records[shard.start_row * n : (shard.start_row + shard.num_rows) * n]
        receipt = store.commit(write_part(task, mine, prepared.config, "revision-1", "worker-0", 1.0))
    if unfinished:
        late = storage.read_bytes(storage.join(store.output, receipt.path))
        storage.write_bytes(storage.join(store.output, "data/part-00099-run-1.parquet"), late)
    else:
        store.finish(prepared.config, store.committed().values(), {})
    return store.output


def answer(uid: str, text: str = "hello", sample_index: int = 0, *, chat: bool = True, **changes: Any) -> SampleRecord:
    """A sample of five tokens, with all extras, of a prompt of two."""
    asked = {"prompt": None, "messages": ({"role": "system", "content": "be brief"}, {"role": "user", "content": uid})}
    fields: dict[str, Any] = {
        "generation": text,
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "prompt_token_ids": (8, 9),
        "token_logprobs": (-0.5,) * 5,
        "topk_token_ids": ((1, 2), (2, 3), (3, 4), (4, 5), (5, 6)),
        "topk_logprobs": ((-0.5, -1.5),) * 5,
        **(asked if chat else {}),
    }
    return make_record(uid, sample_index, **{**fields, **changes})


def of_tokens(count: int, **changes: Any) -> dict[str, Any]:
    """The fields of a sample of so many tokens, in as many steps less what was accepted."""
    accepted = changes.pop("accepted", 0)
    steps = count - accepted
    histogram = (steps - 1, *[0] * (accepted - 1), 1) if accepted else (steps,)
    return {
        "completion_tokens": count,
        "stats": AcceptanceStats(
            steps, accepted, accepted, histogram, histogram, {"suffix": accepted} if accepted else {}
        ),
        "completion_token_ids": tuple(range(count)),
        **changes,
    }
