"""A worker turns a shard into a part: a record for every sample of every row, whatever is wrong with the row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import ConfigError, Withdrawn
from pipeline.parts import read_part_rows
from pipeline.records import PartReceipt, Redo, ShardTask
from pipeline.schema import STATS_COLUMNS, stats_of
from pipeline.shards import plan
from workers.actor import GenerationWorker

PROMPTS = ["One step", None, "The dog sleeps", "", "def add(a, b):", "fox " * 800]
ERRORS = [None, "null_prompt", None, "empty_prompt", None, "prompt_too_long"]


@pytest.fixture
def make_config(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> Callable[..., JobConfig]:
    def make(prompts: Sequence[Any], **sections: Mapping[str, Any]) -> JobConfig:
        path = tmp_path / "prompts.parquet"
        pq.write_table(pa.table({"prompt": prompts, "task": [f"task {i}" for i in range(len(prompts))]}), path)
        data: dict[str, Any] = {
            "model": {"id": str(tiny_model_dir("llama")), "dtype": "float32", "device": "cpu"},
            "input": {"path": str(path), "prompt_column": "prompt"},
            "output": {"path": str(tmp_path / "output"), "columns": ["task"]},
            "sampling": {"max_tokens": 8, "temperature": 0.8, "n": 2},
            "engine": {"max_sequences": 4},
        }
        for section, keys in sections.items():
            data[section] = {**data.get(section, {}), **keys}
        return parse_job(data)

    return make


def task_of(config: JobConfig, **fields: Any) -> ShardTask:
    """The first shard of a job, as the driver would send it."""
    job_plan = plan(config)
    return ShardTask(
        job_plan.shards[0],
        attempt=1,
        run_id="run",
        output=config.output.path,
        passthrough=job_plan.passthrough,
        **fields,
    )


def test_rows_done_again_are_those_of_an_undisturbed_run(make_config: Callable[..., JobConfig]) -> None:
    """The rows that were lost are decoded, alone; the part holds all others as they were, failed ones too."""
    config = make_config(PROMPTS)
    worker = GenerationWorker(config, "worker-0")
    undisturbed = rows_of(config, worker.generate(task_of(config)))
    standing = worker.generate(replace(task_of(config, dead_rows=(0, 4)), attempt=2))
    assert standing.errors["worker_crash"] == 4
    before = rows_of(config, standing)
    decoded = worker.progress().completion_tokens
    redo = Redo(standing.path, generation=3, error_type="worker_crash")
    receipt = worker.generate(replace(task_of(config, redo=redo), attempt=3))
    after = rows_of(config, receipt)
    assert (receipt.generation, receipt.num_rows, receipt.num_failed) == (3, 12, 6)
    assert receipt.errors == {"null_prompt": 2, "empty_prompt": 2, "prompt_too_long": 2}
    assert receipt.completion_tokens == sum(row["completion_tokens"] for row in after)
    again = [i for i in range(12) if i // 2 in (0, 4)]
    assert [row for i, row in enumerate(after) if i not in again] == [r for i, r in enumerate(before) if i not in again]
    speed = {"latency_s", *STATS_COLUMNS, "mean_acceptance_length", "draft_acceptance_rate"}
    for i in again:
        assert {k: v for k, v in after[i].items() if k not in speed} == {
            k: v for k, v in undisturbed[i].items() if k not in speed
        }
    assert worker.progress().completion_tokens - decoded == sum(after[i]["completion_tokens"] for i in again)


def rows_of(config: JobConfig, receipt: PartReceipt) -> list[dict[str, Any]]:
    return list(read_part_rows(f"{config.output.path}/{receipt.path}", ()))


def test_every_row_gives_all_its_samples_in_order(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(PROMPTS)
    receipt = GenerationWorker(config, "worker-0").generate(task_of(config))
    rows = rows_of(config, receipt)
    assert [(row["prompt"], row["sample_index"]) for row in rows] == [
        (prompt or None, i) for prompt in PROMPTS for i in range(2)
    ]
    assert [row["error_type"] for row in rows] == [kind for kind in ERRORS for _ in range(2)]
    assert [row["task"] for row in rows] == [f"task {i}" for i in range(6) for _ in range(2)]
    assert (receipt.num_rows, receipt.num_failed, receipt.worker) == (12, 6, "worker-0")
    assert receipt.errors == {"null_prompt": 2, "empty_prompt": 2, "prompt_too_long": 2}


def test_samples_and_errors_have_the_figures_that_they_should(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(PROMPTS)
    for row in rows_of(config, GenerationWorker(config, "worker-0").generate(task_of(config))):
        stats = stats_of(row)  # asserts the invariants
        assert row["completion_tokens"] == stats.completion_tokens
        if row["finish_reason"] == "error":
            assert (row["generation"], row["prompt_tokens"], row["completion_tokens"]) == (None, 0, 0)
            assert row["error"]
        else:
            assert len(row["completion_token_ids"]) == row["completion_tokens"] > 0
            assert row["prompt_tokens"] > 0


def test_an_over_long_prompt_is_cut_when_asked(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(["fox " * 800], sampling={"n": 1}, input={"on_too_long": "truncate_left"})
    (row,) = rows_of(config, GenerationWorker(config, "worker-0").generate(task_of(config)))
    assert row["prompt_tokens"] == 512 - 8  # the context of the model, less max_tokens
    assert row["prompt"] == "fox " * 800


def test_messages_that_the_template_refuses(make_config: Callable[..., JobConfig]) -> None:
    messages = [[{"role": "user", "content": "Hello"}], [{"role": "robot", "content": "Beep"}]]
    config = make_config(messages, sampling={"n": 1})
    good, bad = rows_of(config, GenerationWorker(config, "worker-0").generate(task_of(config)))
    assert (good["messages"], good["prompt"], good["error_type"]) == (messages[0], None, None)
    assert (bad["messages"], bad["error_type"]) == (messages[1], "chat_template_error")
    assert bad["error"] == "the model's chat template refuses these messages: unknown role robot"


def test_rows_are_sampled_as_they_ask(make_config: Callable[..., JobConfig]) -> None:
    """Each row is what a job gives whose sampling is the row's; a bad value is an error row; all of it is told."""
    own: list[Any] = [
        None,
        {"temperature": 0, "max_tokens": 5},
        {"seed": 11},
        {"top_p": 1.5},
        {"temperature": 2.0, "top_k": 3, "stop": ["e"]},
    ]
    prompts = ["One step", "The dog sleeps", "def add(a, b):", "One", "The quick brown fox"]
    settings = {"sampling_column": "own", "tools_column": "tools", "chat_template": True}
    config = make_config(prompts, input=settings, output={"columns": []})
    tools = json.dumps([{"name": "add"}])
    table = pq.read_table(config.input.path[0]).append_column(
        "own", pa.array([json.dumps(s) if s else None for s in own])
    )
    pq.write_table(table.append_column("tools", pa.array([tools, None, None, None, None])), config.input.path[0])
    rows = rows_of(config, GenerationWorker(config, "w").generate(task_of(config)))
    assert [row["error"] for row in rows[6:8]] == ["own.top_p must be in (0, 1], got 1.5"] * 2
    assert [row["error_type"] for row in rows[6:8]] == ["invalid_sampling"] * 2
    assert [row["seed"] for row in rows] == [0, 0, 0, 0, 11, 11, 0, 0, 0, 0]
    assert [row["tools"] for row in rows] == [tools, tools] + [None] * 8
    assert {key: value for key, value in rows[2]["sampling"].items() if value is not None} == own[1]
    for i, asked in enumerate(own):
        if i == 3:
            continue
        alone = make_config(prompts, sampling=asked or {}, input={"chat_template": True}, output={"columns": []})
        expected = rows_of(alone, GenerationWorker(alone, "w").generate(task_of(alone)))[2 * i : 2 * i + 2]
        for one, other in zip(rows[2 * i : 2 * i + 2], expected, strict=True):
            kept = ("generation", "completion_token_ids", "finish_reason", "seed", "prompt_tokens")
            assert [one[key] for key in kept] == [other[key] for key in kept]


def test_dead_rows_are_never_decoded(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(["One step", "The dog"], sampling={"n": 1})
    worker = GenerationWorker(config, "worker-0")
    rows = rows_of(config, worker.generate(task_of(config, dead_rows=(1,))))
    assert [row["error_type"] for row in rows] == [None, "worker_crash"]
    assert rows[1]["error"] == "decoding this row ended the worker's process"
    assert worker.progress().completion_tokens == rows[0]["completion_tokens"]


def test_a_shard_can_be_given_up(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(["One step", "The dog"])
    worker = GenerationWorker(config, "worker-0")
    receipt = worker.fail_rows(task_of(config), "transient_error", "the store was away")
    rows = rows_of(config, receipt)
    assert {(row["error_type"], row["error"]) for row in rows} == {("transient_error", "the store was away")}
    assert (receipt.num_rows, receipt.num_failed, worker.progress().completion_tokens) == (4, 4, 0)


def test_a_probe_decodes_some_rows_and_writes_nothing(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(["One step", "The dog", "def add"], sampling={"n": 1, "ignore_eos": True})
    worker = GenerationWorker(config, "worker-0")
    worker.probe(task_of(config), start_row=1, num_rows=2)
    assert worker.progress().completion_tokens == 2 * 8
    worker.probe(task_of(config, dead_rows=(1,)), start_row=1, num_rows=2)
    assert worker.progress().completion_tokens == 3 * 8
    assert not Path(config.output.path).exists()


def test_progress_before_and_after_work(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(PROMPTS)
    worker = GenerationWorker(config, "worker-0")
    assert (worker.progress().state, worker.progress().rows_done) == ("loading", 0)
    receipt = worker.generate(task_of(config))
    progress = worker.progress()
    assert (progress.state, progress.rows_done, progress.rows_failed) == ("idle", 12, 6)
    assert (progress.completion_tokens, progress.stats) == (receipt.completion_tokens, receipt.stats)


def test_a_model_that_is_not_there_is_told_by_ready(make_config: Callable[..., JobConfig], tmp_path: Path) -> None:
    config = make_config(["One step"], model={"id": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"^model\.id must be "):
        GenerationWorker(config, "worker-0").ready()


def test_a_withdrawn_task_ends_and_leaves_no_part(make_config: Callable[..., JobConfig]) -> None:
    config = make_config(["One step", "The dog"], sampling={"n": 1, "max_tokens": 400, "ignore_eos": True})
    worker = GenerationWorker(config, "worker-0")
    worker.ready()
    task = task_of(config)
    with ThreadPoolExecutor() as callers:
        attempt = callers.submit(worker.generate, task)
        while not worker.progress().running:
            pass
        worker.withdraw(task.part_name)
        with pytest.raises(Withdrawn):
            attempt.result(timeout=60)
    assert not Path(config.output.path).exists()
    assert worker.progress().state == "idle"
