"""What a dry run says of a job before it is paid for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.estimate import Calibration, PromptFigures, calibration_lines, projected, prompt_lines, size
from pipeline.config import JobConfig
from pipeline.config_io import parse_job

MakeJob = Callable[..., Any]


def job(*overrides: str) -> JobConfig:
    return parse_job({"model": "m", "input": "in.parquet", "output": "out"}, overrides)


MEASURED = Calibration(9.0, 900, 3, 600, 1.5, "this CPU with 2 threads")


def test_a_job_is_projected_from_what_was_measured() -> None:
    estimate = projected(MEASURED, job("sampling.max_tokens=1000", "sampling.n=2"), rows=500)
    assert (estimate.tokens_per_sample, estimate.worker_seconds, estimate.num_bytes) == (300, 3000, 200_000)


def test_samples_are_no_longer_than_they_may_be() -> None:
    assert projected(MEASURED, job("sampling.max_tokens=40"), rows=1).tokens_per_sample == 40
    unfinished = Calibration(9.0, 900, 0, 600, 1.5, "m")
    estimate = projected(unfinished, job("sampling.max_tokens=4000"), rows=1)
    assert (estimate.tokens_per_sample, estimate.num_bytes) == (4000, None)


def test_an_estimate_in_sentences() -> None:
    config = job(
        "sampling.max_tokens=1000", "cluster.workers={min: 1, max: 4}", "cluster.gpus_per_worker=1", "sampling.n=2"
    )
    assert list(calibration_lines(config, 5000, MEASURED)) == [
        "Calibration on this CPU with 2 threads: 100.0 tokens/s in 9.0 s, 1.50 tokens a step; 3 samples ended.",
        "Expected, if workers are as fast as this machine: 300 tokens a sample, 8 h 20 min with 1 worker, 2 h 05 min "
        "with 4 workers; 8.33 worker-hours.",
        "That is 8.33 GPU-hours.",
        "Size of the output: about 2 MB.",
    ]


def test_prompts_in_sentences() -> None:
    figures = PromptFigures(103, (*range(1, 100), 600), {"null_prompt": 3}, max_context=512)
    assert list(prompt_lines(job(), figures)) == [
        "Prompt tokens, in 103 sampled rows: mean 56, 50 % 50, 90 % 90, 99 % 104, longest 600.",
        "1 of them leave no room in the context of 512 tokens: they become error rows.",
        "3 of them become error rows: null_prompt.",
    ]
    cutting = job("input.on_too_long=truncate_left")
    assert "they lose their oldest tokens" in [*prompt_lines(cutting, figures)][1]
    assert (figures.served_share(job()), figures.served_share(cutting)) == (99 / 103, 100 / 103)


@pytest.mark.parametrize(("num_bytes", "text"), [(12, "12 B"), (2_500_000, "2.5 MB"), (3.2e12, "3.2 TB")])
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--dry-run", *map(str, arguments)])
    assert caught.value.code == 0
    return capsys.readouterr().out.split("\n\n", 1)[1].splitlines()


def test_a_dry_run_measures_a_sample_of_the_rows(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_job(["One step", None, "fox " * 800, "The dog"] * 10, sampling={"n": 2, "ignore_eos": True})
    rows, lengths, long, null, speed, expected, size_line = shown(capsys, config.file, "--calibrate")
    assert rows == "40 rows of 1 files, in 10 shards; 2 samples of each."
    assert lengths.startswith("Prompt tokens, in 40 sampled rows: mean ")
    assert long == "10 of them leave no room in the context of 512 tokens: they become error rows."
    assert null == "10 of them become error rows: null_prompt."
    assert speed.startswith("Calibration on this CPU with 1 threads: ")
    assert speed.endswith(" 40 samples ended.")
    assert ": 12 tokens a sample, " in expected
    assert size_line.startswith("Size of the output: about ")
    assert not config.output.exists()


def test_a_dry_run_needs_no_weights_and_no_tokenizer(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        (tmp_path / "bare" / name).write_bytes((tiny_model_dir("llama") / name).read_bytes())
    job_file = make_job(["One step"]).file
    assert len(shown(capsys, job_file, f"--model={tmp_path / 'bare'}")) == 2
    rows, unknown = shown(capsys, job_file, f"--model={tmp_path / 'none'}")
    assert rows.startswith("1 rows of 1 files")
    assert unknown.startswith("Prompt lengths are not known: model.id must be a folder or GGUF file that exists, got ")


def test_calibrating_is_part_of_a_dry_run(make_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--calibrate", str(make_job(["One step"]).file)])
    assert caught.value.code == 2
    assert "--calibrate needs --dry-run" in capsys.readouterr().err
