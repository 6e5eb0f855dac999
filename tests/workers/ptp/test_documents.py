"""Documents from data sets and from the pipeline's own outputs, against what went in and what the worker read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.commits import JobStore
from pipeline.config import JobConfig, ModelConfig
from pipeline.config_io import parse_job
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError
from pipeline.preparation import prepare
from pipeline.records import ShardTask
from workers.actor import GenerationWorker
from workers.model_loading import LoadedModel, load_model
from workers.ptp.documents import Document, InputSource, OutputSource, check_outputs, is_held_out
from workers.ptp.edges import token_edges


def every_row(row_id: str) -> bool:
    return True


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Callable[[str], Path]) -> Path:
    """Six chat prompts, two samples of each, two shards; run in this process."""
    folder = tmp_path_factory.mktemp("job")
    prompts = [[{"role": "user", "content": f"add {i} to it"}] for i in range(6)]
    pq.write_table(pa.table({"messages": prompts}), folder / "prompts.parquet")
    run_here(job_of(folder, tiny_model_dir("llama")))
    return folder / "output"


def job_of(folder: Path, model: Path, **changes: dict[str, Any]) -> JobConfig:
    data: dict[str, Any] = {
        "model": {"id": str(model), "dtype": "float32", "device": "cpu"},
        "input": {"path": str(folder / "prompts.parquet")},
        "output": {"path": str(folder / "output"), "rows_per_shard": 4, "extras": ["token_ids", "cdf"]},
        "sampling": {"temperature": 0.8, "top_k": 50, "max_tokens": 9, "n": 2, "coupling": "inverse_cdf", "seed": 3},
        "decoding": {"strategy": "autoregressive"},
    }
    for section, keys in changes.items():
        data[section] = {**data[section], **keys}
    return parse_job(data)


def run_here(config: JobConfig) -> None:
    prepared = prepare(config)
    worker = GenerationWorker(prepared.config, "worker-0")
    store = JobStore(config.output.path)
    store.create_or_resume(prepared.config, prepared.plan, worker.ready())
    for shard in prepared.remaining:
        store.commit(worker.generate(ShardTask(shard, 1, "here", config.output.path, prepared.plan.passthrough)))


def test_completions_follow_the_prompt_that_the_worker_read(output: Path, loaded: LoadedModel) -> None:
    """The stored edges are those of the model after exactly these ids: a wrong prompt would move them all."""
    source = OutputSource(check_outputs([str(output)]), loaded.tokenizer, loaded.max_context)
    documents = [document for unit in range(source.units) for document in source.read(unit, every_row)]
    assert source.units == 2
    assert len(documents) == 12
    params = job_of(output.parent, output).sampling
    for document in documents:
        assert document.low is not None
        assert document.high is not None
        assert np.isnan(document.low[~document.is_target]).all()
        ids = torch.from_numpy(document.ids)
        with torch.no_grad():
            logits = loaded.model(input_ids=ids[None]).logits[0]
        targets = torch.from_numpy(document.is_target).nonzero()[:, 0]
        low, high = token_edges(logits[targets - 1], ids[targets], params)
        np.testing.assert_allclose(document.low[targets], low.numpy(), atol=1e-5)
        np.testing.assert_allclose(document.high[targets], high.numpy(), atol=1e-5)


def test_samples_of_a_prompt_are_on_one_side(output: Path, loaded: LoadedModel) -> None:
    source = OutputSource(check_outputs([str(output)]), loaded.tokenizer, loaded.max_context)
    seen: list[str] = []

    def wanted(row_id: str) -> bool:
        seen.append(row_id)
        return is_held_out(row_id, 0.5)

    kept = [document for unit in range(source.units) for document in source.read(unit, wanted)]
    assert len(seen) == 12
    assert len(set(seen)) == 6
    assert len(kept) == 2 * sum(is_held_out(row_id, 0.5) for row_id in set(seen))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output": {"extras": ["token_ids"]}}, "made with output.extras token_ids and cdf"),
        ({"sampling": {"temperature": 0.0, "top_k": 0}}, "sampled at a temperature above 0"),
        ({"sampling": {"repetition_penalty": 1.2}}, "sampled without penalties"),
    ],
)
def test_outputs_that_are_no_training_data(output: Path, tmp_path: Path, changes: Any, sentence: str) -> None:
    dumped = job_of(output.parent, tmp_path / "model", **changes).model_dump(mode="json")
    (tmp_path / "_job.json").write_text(json.dumps({"config": dumped, "identity": {}}))
    with pytest.raises(ConfigError, match=sentence):
        check_outputs([str(tmp_path)])


def test_outputs_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be the output of a job"):
        check_outputs([str(tmp_path)])


def source_of(loaded: LoadedModel, path: Path, ids_column: str | None = None) -> InputSource:
    return InputSource(InputConfig(path=(str(path),)), ids_column, loaded.tokenizer, 0, 320)


def test_text_is_a_target_from_its_second_token_on(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "the quick fox"}\n{"text": ""}\n')
    (document,) = source_of(loaded, tmp_path / "x.jsonl").read(0, every_row)
    assert document.ids.tolist() == [*loaded.tokenizer("the quick fox")["input_ids"], 0]
    assert document.is_target.tolist() == [False] + [True] * (len(document) - 1)


def test_ids_are_taken_as_they_are_and_checked(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "x.jsonl").write_text('{"ids": [3, 1, 319]}\n{"ids": [1]}\n')
    pq.write_table(pa.table({"ids": [[3, 1, 319], [1], None]}), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        (document,) = source_of(loaded, tmp_path / name, "ids").read(0, every_row)
        assert document.ids.tolist() == [3, 1, 319]
    (tmp_path / "y.jsonl").write_text('{"ids": [3, 320]}\n')
    with pytest.raises(ConfigError, match=r"data.ids_column must hold lists of token ids below 320, got \[3, 320\]"):
        list(source_of(loaded, tmp_path / "y.jsonl", "ids").read(0, every_row))


def test_only_what_the_assistant_said_is_a_target(tmp_path: Path, loaded: LoadedModel) -> None:
    messages = [
        {"role": "user", "content": "add 1"},
        {"role": "assistant", "content": "return a"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "jumps over"},
    ]
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (document,) = source_of(loaded, tmp_path / "x.jsonl").read(0, every_row)
    targets = loaded.tokenizer.decode(document.ids[document.is_target])
    assert targets == "return a<|end|>jumps over<|end|>"
    whole = loaded.tokenizer.apply_chat_template(messages, tokenize=False)
    assert loaded.tokenizer.decode(document.ids) == whole.removesuffix("\n")


def test_a_slice_keeps_what_belongs_together() -> None:
    edges = np.arange(4.0)
    part = Document(np.arange(4), np.ones(4, np.bool_), edges, edges + 1).slice(1, 3)
    assert part.ids.tolist() == [1, 2]
    assert part.low is not None
    assert part.low.tolist() == [1.0, 2.0]
