"""The tail of a job: 256 prompts of very unequal output lengths on one engine, plain decoding against auto.

    python infra/trials/tail.py PROMPTS.parquet OUT.json CHART.png [--rounds 2]

Samples end where the model ends them, or after 512 tokens. Prints one JSON line: seconds of the whole job and of its
last tenth of samples, for each strategy, and writes a chart of the mean window (draft rows per sequence) and of the
number of running sequences over the job's time.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
import torch
from demo_job import demo_job

from jobs.bench.workload import load_workload
from pipeline.config import EngineConfig, JobConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model

PROMPTS, BATCH, MOST_TOKENS = 256, 16, 512


@dataclass(frozen=True, slots=True)
class Run:
    """One pass: when each sample ended, and per step (time, running sequences, draft rows)."""

    finished_s: list[float]
    steps: list[tuple[float, int, int]]
    tokens: list[tuple[int, ...]]

    @property
    def total_s(self) -> float:
        return self.finished_s[-1]

    @property
    def tail_s(self) -> float:
        """From the moment that nine tenths of the samples had ended."""
        return self.finished_s[-1] - self.finished_s[int(len(self.finished_s) * 0.9) - 1]


def run(loaded: LoadedModel, decoding: DecodingConfig, requests: list[Request]) -> Run:
    engine = Engine(loaded, EngineConfig(max_sequences=BATCH), decoding)
    engine.generate([Request("warm-up", requests[0].prompt_ids, SamplingConfig(max_tokens=8, temperature=0.0))])
    for request in requests:
        engine.submit(request)
    began = time.perf_counter()
    finished: list[float] = []
    steps = []
    tokens = {}
    while engine.has_work:
        running = engine.num_running
        results = engine.step()
        now = time.perf_counter() - began
        finished += [now] * len(results)
        tokens |= {result.uid: result.token_ids for result in results}
        last = engine.speculation.last_step if engine.speculation else None
        steps.append((now, running, last.draft_rows if last else 0))
    return Run(finished, steps, [tokens[request.uid] for request in requests])


def draw(run: Run, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at, running, rows = (np.array(column, dtype=float) for column in zip(*run.steps, strict=True))
    bins = np.linspace(0, at[-1], 80)
    where = np.digitize(at, bins)
    kept = [b for b in range(1, len(bins) + 1) if (where == b).any()]
    window = [rows[where == b].sum() / max(1.0, running[where == b].sum()) for b in kept]
    figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
    other = axis.twinx()
    other.fill_between([bins[b - 1] for b in kept], [running[where == b].mean() for b in kept], color="0.88")
    axis.plot([bins[b - 1] for b in kept], window, color="tab:blue")
    axis.set(xlabel="seconds", ylabel="draft rows per sequence (line)", zorder=2)
    axis.patch.set_visible(False)
    other.set_ylabel("running sequences (area)")
    figure.savefig(path, dpi=120)


@click.command()
@click.argument("prompts_file")
@click.argument("json_file")
@click.argument("chart_file")
@click.option("--rounds", default=2, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(prompts_file: str, json_file: str, chart_file: str, rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    job = demo_job(prompts_file, MOST_TOKENS)
    loaded = load_model(job.model)
    sampling = SamplingConfig(max_tokens=MOST_TOKENS, temperature=0.0)
    requests = [Request(f"row-{i}", ids, sampling) for i, ids in enumerate(_prompt_ids(job, loaded))]
    contestants: dict[str, DecodingConfig] = {"autoregressive": AutoregressiveConfig(), "auto": AutoConfig()}
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in sorted(contestants, reverse=turn % 2 == 0):
            runs[name].append(run(loaded, contestants[name], requests))
    assert all(one.tokens == runs["auto"][0].tokens for some in runs.values() for one in some), "outputs differ"
    report: dict[str, Any] = {
        name: {
            "total_s": round(statistics.median(one.total_s for one in some), 2),
            "tail_s": round(statistics.median(one.tail_s for one in some), 2),
        }
        for name, some in runs.items()
    }
    lengths = sorted(map(len, runs["auto"][0].tokens))
    report["requests"] = {"prompts": len(requests), "batch": BATCH, "rounds": rounds, "tokens": sum(lengths)}
    report["lengths"] = {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]}
    with open(json_file, "w") as file:
        json.dump(report | {"runs": {name: [asdict(one) for one in some] for name, some in runs.items()}}, file)
    draw(runs["auto"][-1], chart_file)
    print(json.dumps(report))


def _prompt_ids(job: JobConfig, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """The first prompts of at most 1,000 characters, rendered as a job would."""
    return list(load_workload(job, loaded, limit=PROMPTS, spread=False, max_prompt_chars=1000).prompts)


if __name__ == "__main__":
    main()
