"""Small jobs on a tiny model, and the command line in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

COMMAND = (sys.executable, "-c", "from jobs.cli import entry; entry()")


@dataclass(frozen=True)
class Job:
    """A job file, and where its output goes."""

    file: Path
    output: Path


def write_prompts(path: Path, prompts: Sequence[Any], **columns: Sequence[Any]) -> Path:
    """A Parquet file with a column `prompt`, in row groups of 8."""
    pq.write_table(pa.table({"prompt": list(prompts), **columns}), path, row_group_size=8)
    return path


def job_data(model: Path, prompts: Path | str, output: Path | str) -> dict[str, Any]:
    """A job of some seconds: sampled, with stop on the end token, several shards."""
    return {
        "model": {"id": str(model), "dtype": "float32", "device": "cpu"},
        "input": {"path": str(prompts)},
        "output": {"path": str(output), "rows_per_shard": 4},
        "sampling": {"temperature": 0.8, "top_p": 0.95, "max_tokens": 12, "seed": 7},
        "engine": {"max_sequences": 4},
    }


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    from jobs.cli import main

    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return int(caught.value.code or 0), captured.out, captured.err


@pytest.fixture
def make_job(tmp_path: Path, tiny_model_dir: Callable[[str], Path]) -> Callable[..., Job]:
    """`make_job(prompts, name="job", **sections)`; a section's keys are added to those of `job_data`."""

    def make(prompts: Sequence[Any] | Path | str, name: str = "job", **sections: dict[str, Any]) -> Job:
        if not isinstance(prompts, Path | str):
            prompts = write_prompts(tmp_path / f"{name}.parquet", prompts)
        data = job_data(tiny_model_dir("llama"), prompts, tmp_path / f"{name}-output")
        for section, keys in sections.items():
            data[section] = {**data.get(section, {}), **keys}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(data))
        return Job(file, Path(data["output"]["path"]))

    return make


@pytest.fixture
def start_cli(python_handles_sigint: None) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command line in a process group of its own, with its output piped."""

    def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "COLUMNS": "200", **environment},
        )

    return start


@pytest.fixture
def run_cli(start_cli: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line to its end."""

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        process = start_cli(*arguments, **environment)
        stdout, stderr = process.communicate(timeout=180)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def run_here() -> Callable[[Job], None]:
    """Runs a job to its end in this process, with one worker and without Ray."""

    def run(job: Job) -> None:
        from pipeline.commits import JobStore
        from pipeline.config_io import load_job
        from pipeline.preparation import prepare
        from pipeline.records import ShardTask
        from workers.actor import GenerationWorker

        prepared = prepare(load_job(str(job.file)))
        worker = GenerationWorker(prepared.config, "worker-0")
        store = JobStore(str(job.output))
        store.create_or_resume(prepared.config, prepared.plan, worker.ready())
        for shard in prepared.remaining:
            store.commit(worker.generate(ShardTask(shard, 1, "here", str(job.output), prepared.plan.passthrough)))
        store.finish(prepared.config, store.committed().values(), {})

    return run
