"""Every job file of configs/ plans what it will do, and the small ones run, with a tiny model in place of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs.cli import main
from pipeline.config_io import dump_job, load_job
from pipeline.schema import OUTPUT_COLUMNS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
JOBS = [file for file in FILES if "model" in yaml.safe_load(file.read_text())]
SMALL = [file for file in JOBS if "configs/data/quickstart.parquet" in file.read_text()]
"""Their prompts are in the repository; those of others are made by an earlier step, or are in a bucket."""


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """All columns that a job file of the gallery asks for."""
    rows = [{"id": f"row-{i}", "prompt": f"One step, number {i}.", "task": "walk"} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    return str(tmp_path / "prompts.parquet")


def test_each_file_is_of_a_job_or_of_a_training() -> None:
    assert len(SMALL) >= 4
    assert all("base" in yaml.safe_load(file.read_text()) for file in FILES if file not in JOBS)


@pytest.mark.parametrize("file", JOBS, ids=name_of)
def test_a_dry_run(
    file: Path, prompts: str, tiny_model_dir: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["run", str(file), "--dry-run", "--input", prompts, "--model", str(tiny_model_dir("llama"))])
    shown = capsys.readouterr().out
    assert ending.value.code == 0
    resolved = yaml.safe_load(shown.split("\n\n")[0])
    assert resolved["decoding"] == load_job(str(file)).decoding.model_dump(mode="json")
    assert "5 rows" in shown


@pytest.mark.parametrize("file", SMALL, ids=name_of)
def test_a_run_of_some_rows(
    file: Path,
    tmp_path: Path,
    tiny_model_dir: Callable[[str], Path],
    run_here: Callable[[Any], None],
    make_job: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, without Ray; test_run.py has jobs on Ray."""
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out"
    small = {
        "model.id": str(tiny_model_dir("llama")),
        "output.path": str(output),
        "input.limit": 3,
        "sampling.max_tokens": 6,
        "engine.kv_memory_gb": 0.05,
    }
    config = load_job(str(file), [f"{key}={json.dumps(value)}" for key, value in small.items()])
    job = make_job([])  # its place is taken by the job of the file
    job.file.write_text(dump_job(config))
    run_here(type(job)(job.file, output))
    parts = [part["path"] for part in json.loads((output / "_manifest.json").read_text())["parts"]]
    table = pa.concat_tables([pq.read_table(output / part) for part in parts])
    assert table.num_rows == 3 * config.sampling.n
    assert set(table["finish_reason"].to_pylist()) <= {"stop", "length"}
    assert set(config.output.columns) <= set(table.column_names)
    assert {"id", "generation"} <= set(table.column_names) & set(OUTPUT_COLUMNS)
