"""`sevenleague preview`: the first prompts as the model reads them, and what it generates; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from rich.console import Console
from rich.rule import Rule

from jobs.calibration import measure_prompts, sampled_prompts
from jobs.estimate import plan_lines, prompt_lines
from pipeline.config import JobConfig
from pipeline.config_io import load_job
from pipeline.errors import RowError
from pipeline.prompts import Prompt, read_prompts
from pipeline.shards import Plan, plan
from workers.actor import worker_threads
from workers.engine import Engine, Request
from workers.model_loading import load_model
from workers.rendering import make_renderer


def command(job_file: str, overrides: Sequence[str], count: int) -> None:
    """The CLI command."""
    config = load_job(job_file, overrides)
    job_plan = plan(config)
    prompts = list(islice(_prompts(config, job_plan), count))
    torch.set_num_threads(worker_threads(config))
    loaded = load_model(config.model)
    renderer = make_renderer(loaded, config)
    engine = Engine(loaded, config.engine, config.decoding)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    figures = measure_prompts(config, sampled_prompts(config, job_plan), loaded.tokenizer, loaded.max_context)
    for line in (*plan_lines(config, job_plan), *prompt_lines(config, figures)):
        console.print(line)
    for prompt in prompts:
        console.print(Rule(prompt.uid, align="left"))
        try:
            console.print(renderer.text(prompt))
            ids = renderer.token_ids(prompt, config.sampling.max_tokens)
            results = engine.generate([Request(prompt.uid, ids, prompt.sampled_by(config.sampling))])
        except RowError as error:
            console.print(f"error {error.error_type}: {error}")
            continue
        for result in results:
            console.print(
                f"--- sample {result.sample_index}: {len(ids)} prompt tokens, {len(result.token_ids)} new tokens in "
                f"{result.stats.num_steps} steps, ended by {result.finish_reason}"
            )
            console.print(result.text)


def first_prompts(config: JobConfig) -> Iterator[Prompt]:
    """The prompts of a job in the order of its plan."""
    return _prompts(config, plan(config))


def _prompts(config: JobConfig, job_plan: Plan) -> Iterator[Prompt]:
    for shard in job_plan.shards:
        yield from read_prompts(shard, config.input, config.output.columns)
