"""Jobs from the command line to the output, on a Ray session that all tests of this file share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from jobs.cli import main
from jobs.ray_session import ray_session
from jobs.run import run_job
from pipeline.config_io import load_job
from pipeline.schema import stats_of

pytestmark = pytest.mark.ray

MakeJob = Callable[..., Any]
PROMPTS = [f"One step of seven-league boots, number {i}." for i in range(10)]


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    from pipeline.config_io import parse_job

    with ray_session(parse_job({"model": "any", "input": "any", "output": "any", "cluster": {"workers": 2}})):
        yield


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert caught.value.code is None or isinstance(caught.value.code, int)
    return caught.value.code or 0, captured.out, captured.err


def rows_of(output: Path) -> list[dict[str, Any]]:
    manifest = json.loads((output / "_manifest.json").read_text())
    return [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]


def test_a_job_ends_with_its_output_and_figures(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(PROMPTS, sampling={"n": 2}, cluster={"workers": 2})
    code, shown, _ = call(capsys, "run", job.file)
    assert code == 0
    assert "Acceptance by drafter" in shown
    assert "(the model's own)" in shown
    assert f"20 of 20 samples are in {job.output}" in shown
    rows = rows_of(job.output)
    assert sorted((row["prompt"], row["sample_index"]) for row in rows) == [(p, i) for p in PROMPTS for i in range(2)]
    assert all(stats_of(row).completion_tokens == row["completion_tokens"] for row in rows)
    assert (job.output / "_SUCCESS").exists()

    code, shown, _ = call(capsys, "status", job.output, "--json")
    status = json.loads(shown)
    assert code == 0
    assert set(status) == {
        "state",
        "shards",
        "rows",
        "completion_tokens",
        "num_steps",
        "tokens_per_step",
        "mean_acceptance_length",
    }
    assert status["state"] == "done"
    assert status["shards"] == {"total": 3, "committed": 3}
    assert status["rows"] == {"total": 20, "ok": 20, "failed": 0}
    assert status["completion_tokens"] == sum(row["completion_tokens"] for row in rows)

    code, shown, _ = call(capsys, "status", job.output)
    assert code == 0
    assert shown.startswith("done: 3 of 3 shards, 20 of 20 samples, 0 failed")

    by = json.loads(call(capsys, "status", job.output, "--json", "--by", "sample_index")[1])["by"]
    assert [(value, figures["rows"]) for value, figures in by.items()] == [("0", 10), ("1", 10)]
    assert sum(figures["completion_tokens"] for figures in by.values()) == status["completion_tokens"]
    assert "Acceptance by sample_index" in call(capsys, "status", job.output, "--by", "sample_index")[1]


def test_the_same_job_with_another_strategy_is_the_same_data(make_job: MakeJob) -> None:
    prompts = make_job(PROMPTS).file.with_suffix(".parquet")
    data = []
    for strategy in ("autoregressive", "lookahead"):
        job = make_job(prompts, name=strategy)
        summary = run_job(str(job.file), [f"decoding={strategy}"])
        assert (summary.state, summary.rows_failed) == ("done", 0)
        data.append(sorted((row["prompt"], row["completion_token_ids"]) for row in rows_of(job.output)))
    assert data[0] == data[1]


def test_a_python_user_may_give_plain_data_or_a_config(make_job: MakeJob) -> None:
    job = make_job(PROMPTS[:2])
    seen: list[int] = []
    summary = run_job(
        yaml.safe_load(job.file.read_text()), on_progress=lambda progress: seen.append(progress.rows_done)
    )
    assert summary.rows_ok == 2
    assert seen[-1] == 2
    assert run_job(load_job(str(job.file))).rows_ok == 2  # resumed: nothing left to do


def test_failed_rows_end_with_exit_code_3(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(["One step", None, "", "fox " * 800])
    code, shown, _ = call(capsys, "run", job.file)
    assert code == 3
    assert "failed: 1 samples with prompt_too_long" in shown
    assert "1 of 4 samples are in" in shown
    assert [row["error_type"] for row in rows_of(job.output)] == [
        None,
        "null_prompt",
        "empty_prompt",
        "prompt_too_long",
    ]
    status = json.loads(call(capsys, "status", job.output, "--json")[1])
    assert (status["state"], status["rows"]) == ("done", {"total": 4, "ok": 1, "failed": 3})


def test_failed_rows_are_done_again_when_their_cause_has_gone(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two prompts need more KV memory than the first run has; the rest is not decoded again."""
    prompts = make_job([*PROMPTS[:5], "0123456789" * 20, None, "9876543210" * 20]).file.with_suffix(".parquet")
    plain: dict[str, Any] = {"decoding": {"strategy": "autoregressive"}}  # drafts would need KV memory too
    whole, job = make_job(prompts, name="whole", **plain), make_job(prompts, name="small", **plain)
    assert call(capsys, "run", whole.file)[0] == 3
    code, shown, _ = call(capsys, "run", job.file, "--set", "engine.kv_memory_gb=3.2e-5")
    assert code == 3
    assert "failed: 2 samples with prompt_too_long" in shown
    before = rows_of(job.output)
    code, shown, _ = call(capsys, "run", job.file, "--retry-failed", "--error-type", "prompt_too_long")
    assert code == 3
    assert "7 of 8 samples are in" in shown
    after, names = rows_of(job.output), ("id", "prompt", "generation", "completion_token_ids", "error_type")
    assert [[row[name] for name in names] for row in after] == [
        [row[name] for name in names] for row in rows_of(whole.output)
    ]
    assert [after[i] for i in (0, 1, 2, 3, 4, 6)] == [before[i] for i in (0, 1, 2, 3, 4, 6)]
    assert len(list((job.output / "data").iterdir())) == 2


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The last line on stderr of a command that ends with exit code 2."""
    code, _, error = call(capsys, *arguments)
    assert code == 2
    return error.splitlines()[-1].removeprefix("sevenleague: ")


def test_no_chat_template(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    import shutil

    model = tmp_path / "plain"
    shutil.copytree(tiny_model_dir("llama"), model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(model)
    job = make_job([[{"role": "user", "content": "Hello"}]], model={"id": str(model)})
    assert mistake(capsys, "run", job.file) == (
        "input must hold plain strings (no messages, system_prompt or chat_template) for a model whose tokenizer has "
        "no chat template, got messages"
    )


def test_a_model_that_is_not_there(make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = make_job(PROMPTS, model={"id": str(tmp_path / "none")})
    assert mistake(capsys, "run", job.file).startswith("model.id must be ")


def test_more_gpus_than_there_are(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(PROMPTS, cluster={"workers": 2, "gpus_per_worker": 4})
    said = mistake(capsys, "run", job.file)
    assert said.startswith("cluster.gpus_per_worker ")
    assert "4" in said


def test_an_output_that_cannot_be_written(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    job = make_job(PROMPTS, output={"path": str(tmp_path / "file" / "output")})
    said = mistake(capsys, "run", job.file)
    assert said.startswith(f"output.path must be writable, got '{tmp_path}/file/output': ")


def test_another_job_at_the_output(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(PROMPTS[:2])
    assert call(capsys, "run", job.file)[0] == 0
    said = mistake(capsys, "run", job.file, "--seed", "8")
    assert "sampling.seed" in said
    assert "7" in said
    assert "8" in said
