"""What the pipeline costs around the real engine: jobs of one and of two workers against the bare engine.

    python -m infra.scale.overhead PROMPTS.parquet [--prompts 128] [--max-tokens 128] [--rounds 2]

All decode the same prompts (of at most 1,000 characters) with SmolLM2-135M in bfloat16, greedily, to the same length.
They take turns, in reverse order in every second round, each in new processes: `bare` is one engine of two threads in a
process without Ray, `job` a worker of two threads, `two_workers` two workers of one thread each. On two cores an engine
of two threads shares them with Ray and the driver; `bare_one_thread` and `job_one_thread` leave these a core. Of a job
all but the start of its workers is timed, from its first task to `_SUCCESS`. Nothing else may run meanwhile.
Prints one JSON line: new tokens per second of every turn, and the median ratios of turns of one round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.bench.workload import load_workload, user_chars
from jobs.preview import first_prompts
from pipeline.config import JobConfig
from pipeline.config_io import parse_job

MOST_CHARS = 1000
ROWS_PER_SHARD = 16


def job_of(prompts: Path, output: Path, max_tokens: int, workers: int, threads: int) -> JobConfig:
    return parse_job(
        {
            "model": {"id": "builtin:smollm2-135m", "dtype": "bfloat16"},
            "input": {"path": str(prompts)},
            "output": {"path": str(output), "rows_per_shard": ROWS_PER_SHARD},
            "sampling": {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
            "cluster": {"workers": workers, "cpus_per_worker": threads},
        }
    )


def pick_prompts(source: str, target: Path, count: int) -> None:
    """The first `count` prompts that are short enough, as they are in the source."""
    job = job_of(Path(source), target.parent, 1, 1, 1)
    picked = [prompt for prompt in first_prompts(job) if user_chars(prompt) <= MOST_CHARS][:count]
    assert len(picked) == count, f"{source} has only {len(picked)} prompts of at most {MOST_CHARS} characters"
    messages = [prompt.messages or ({"role": "user", "content": prompt.prompt or ""},) for prompt in picked]
    pq.write_table(pa.table({"messages": messages}), target)


def bare_rate(prompts: Path, max_tokens: int, threads: int) -> float:
    """New tokens per second of an engine in this process; loading and measuring the steps' cost is not timed."""
    import torch

    from workers.actor import worker_threads
    from workers.engine import Engine, Request
    from workers.model_loading import load_model

    job = job_of(prompts, prompts.parent, max_tokens, 1, threads)
    torch.set_num_threads(worker_threads(job))
    loaded = load_model(job.model)
    workload = load_workload(job, loaded, limit=sys.maxsize, spread=False, max_prompt_chars=None)
    engine = Engine(loaded, job.engine, job.decoding, frozenset(job.output.extras))
    requests = [Request(uid, ids, job.sampling) for uid, ids in zip(workload.uids, workload.prompts, strict=True)]
    began = time.perf_counter()
    results = engine.generate(requests)
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)


def job_rate(prompts: Path, max_tokens: int, workers: int, threads: int) -> float:
    """New tokens per second of a job whose workers have loaded their model."""
    import ray

    from jobs.ray_session import ray_session, worker_starter
    from pipeline import driver
    from pipeline.preparation import prepare

    with tempfile.TemporaryDirectory() as output:
        prepared = prepare(job_of(prompts, Path(output), max_tokens, workers, threads))
        with ray_session(prepared.config), worker_starter(prepared.config) as start:
            handles = [start(index) for index in range(workers)]
            ray.get([handle.ready.remote() for handle in handles])
            began = time.perf_counter()
            summary = driver.run(prepared, lambda index: handles[index], lambda progress: None)
            seconds = time.perf_counter() - began
    assert summary.state == "done", summary
    assert summary.rows_failed == 0, summary
    return summary.completion_tokens / seconds


RATES: dict[str, Any] = {
    "bare": lambda prompts, max_tokens: bare_rate(prompts, max_tokens, 2),
    "job": lambda prompts, max_tokens: job_rate(prompts, max_tokens, 1, 2),
    "two_workers": lambda prompts, max_tokens: job_rate(prompts, max_tokens, 2, 1),
    "bare_one_thread": lambda prompts, max_tokens: bare_rate(prompts, max_tokens, 1),
    "job_one_thread": lambda prompts, max_tokens: job_rate(prompts, max_tokens, 1, 1),
}


def turn(contestant: str, prompts: Path, max_tokens: int) -> float:
    """One rate, measured in a new process."""
    command = [sys.executable, "-m", "infra.scale.overhead", str(prompts), "--max-tokens", str(max_tokens)]
    done = subprocess.run([*command, "--only", contestant], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


@click.command()
@click.argument("prompts_file")
@click.option("--prompts", default=128, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--only", type=click.Choice(list(RATES)), hidden=True)
def main(prompts_file: str, prompts: int, max_tokens: int, rounds: int, only: str | None) -> None:
    if only is not None:
        print(RATES[only](Path(prompts_file), max_tokens))
        return
    rates: dict[str, list[float]] = {name: [] for name in RATES}
    with tempfile.TemporaryDirectory() as folder:
        picked = Path(folder) / "prompts.parquet"
        pick_prompts(prompts_file, picked, prompts)
        for number in range(rounds):
            for name in sorted(RATES, reverse=number % 2 == 1):
                rates[name].append(turn(name, picked, max_tokens))
    ratios = {
        f"{name}_over_{other}": round(
            statistics.median(mine / its for mine, its in zip(rates[name], rates[other], strict=True)), 4
        )
        for name, other in (("job", "bare"), ("two_workers", "job"), ("job_one_thread", "bare_one_thread"))
    }
    print(
        json.dumps({"tokens_per_s": {name: [round(rate, 1) for rate in some] for name, some in rates.items()}} | ratios)
    )


if __name__ == "__main__":
    main()
