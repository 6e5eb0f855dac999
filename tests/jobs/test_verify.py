"""Finished samples decoded again: what is identical, a near-tie, a mismatch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.cli import main
from jobs.verify import sampled_rows
from pipeline.commits import JobStore

MakeJob = Callable[..., Any]
RunHere = Callable[[Any], None]
PROMPTS = [*[f"One step of seven-league boots, number {i}." for i in range(17)], None]


@pytest.fixture
def twin_model(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model to which tokens 2i and 2i + 1 are the same, so that every choice of an even one is an exact tie."""
    source, folder = tiny_model_dir("llama"), tmp_path / "twins"
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[3::2] = weight[2::2]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def verify(capsys: pytest.CaptureFixture[str], output: Path, *arguments: str) -> tuple[int, dict[str, int]]:
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(output), "--json", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code, json.loads(capsys.readouterr().out)


def change_token(output: Path, change: Callable[[int], int]) -> None:
    """Changes the first stored token of the first row of the first part."""
    path = min((output / "data").glob("*.parquet"))
    table = pq.read_table(path)
    tokens = table["completion_token_ids"].to_pylist()
    tokens[0][0] = change(tokens[0][0])
    column = table.schema.get_field_index("completion_token_ids")
    pq.write_table(table.set_column(column, table.schema.field(column), pa.array(tokens, pa.list_(pa.int32()))), path)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_honest_output(
    make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    job = make_job(PROMPTS, sampling={"temperature": temperature, "n": 2})
    run_here(job)
    assert verify(capsys, job.output, "--samples", "8") == (
        0,
        {"checked": 8, "identical": 8, "near_tie": 0, "mismatch": 0},
    )
    code, counts = verify(capsys, job.output, "--samples", "100", "--dtype", "float32")
    assert (code, counts["checked"], counts["identical"]) == (0, 34, 34)  # the null prompt's two rows are no samples

    store = JobStore(str(job.output))
    chosen = [(row["prompt"], row["sample_index"]) for row in sampled_rows(store, store.load_config(), 5)]
    samples = [(prompt, i) for prompt in PROMPTS[:17] for i in range(2)]
    assert chosen == [samples[number] for number in (3, 10, 17, 23, 30)]


def test_rows_with_settings_of_their_own(
    make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The output tells how each row was sampled, which verifying follows; else the seeds would not fit."""
    own = [{"temperature": 1.0 + i % 2, "seed": i, "max_tokens": 5 + i} for i in range(6)]
    tools = ['[{"name": "add"}]'] * 6
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:6]]
    pq.write_table(pa.table({"prompt": messages, "own": own, "tools": tools}), tmp_path / "own.parquet")
    settings = {"sampling_column": "own", "tools_column": "tools"}
    job = make_job(tmp_path / "own.parquet", input=settings, sampling={"n": 2, "ignore_eos": True})
    run_here(job)
    assert verify(capsys, job.output, "--samples", "12") == (
        0,
        {"checked": 12, "identical": 12, "near_tie": 0, "mismatch": 0},
    )


def test_a_false_token_is_a_mismatch(make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(PROMPTS[:4], sampling={"temperature": 0.0})
    run_here(job)
    change_token(job.output, lambda token: (token + 1) % 300)
    assert verify(capsys, job.output) == (1, {"checked": 4, "identical": 3, "near_tie": 0, "mismatch": 1})
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(job.output)])
    assert caught.value.code == 1
    assert "mismatch: job.parquet:0 sample 0" in capsys.readouterr().out


def test_a_token_that_is_as_good_is_a_near_tie(
    make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str], twin_model: Path
) -> None:
    job = make_job(PROMPTS[:4], sampling={"temperature": 0.0}, model={"id": str(twin_model)})
    run_here(job)
    change_token(job.output, lambda token: token ^ 1)
    assert verify(capsys, job.output) == (0, {"checked": 4, "identical": 3, "near_tie": 1, "mismatch": 0})


def test_without_token_ids_the_text_is_compared(
    make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(PROMPTS[:4], output={"extras": []})
    run_here(job)
    assert verify(capsys, job.output) == (0, {"checked": 4, "identical": 4, "near_tie": 0, "mismatch": 0})


def test_another_model_is_refused(
    make_job: MakeJob, run_here: RunHere, capsys: pytest.CaptureFixture[str], twin_model: Path
) -> None:
    job = make_job(PROMPTS[:1], model={"id": str(twin_model)})
    run_here(job)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(twin_model)
        model.get_input_embeddings().weight.mul_(2)
        model.save_pretrained(twin_model)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(job.output)])
    assert caught.value.code == 2
    assert "the model must be the one that made the output, revision " in capsys.readouterr().err
