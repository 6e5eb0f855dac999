"""Is auto slower than plain decoding anywhere? Two engines of one process take turns, step by step.

    python infra/trials/paired_steps.py PROMPTS.parquet OUT.json [--batch 1,8,16] [--limit 64] [--temperature 0.7 --n 8]

A machine whose clock or memory drifts is the same for both, so a ratio of some percent shows that whole runs one after
the other (`sevenleague bench`) would not tell from noise. Prints a Markdown table: seconds of all steps of plain
decoding and of auto, their ratio, tokens that a sequence gains per step, draft rows that were bought and that were
accepted, and how many samples are not those of plain decoding.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import click
from demo_job import demo_job

from jobs.bench.workload import Workload, load_workload
from pipeline.config import EngineConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model

TOKENS, WARM_UP_TOKENS = 128, 8
COLUMNS = ("batch", "plain_s", "auto_s", "ratio", "tokens_per_step", "rows", "accepted", "different")


def by_turns(loaded: LoadedModel, work: Workload, sampling: SamplingConfig, batch: int) -> dict[str, Any]:
    """Both engines decode all prompts; whoever has nothing left is passed over."""
    plain, auto = (
        Engine(loaded, EngineConfig(max_sequences=batch), decoding)
        for decoding in (AutoregressiveConfig(), AutoConfig())
    )
    short = sampling.model_copy(update={"max_tokens": WARM_UP_TOKENS})
    for engine in (plain, auto):
        engine.generate([Request(f"warm-up-{i}", ids, short) for i, ids in enumerate(work.warm_up(batch))])
        for uid, ids in zip(work.uids, work.prompts, strict=True):
            engine.submit(Request(uid, ids, sampling))
    gc.collect()
    gc.freeze()
    seconds = {plain: 0.0, auto: 0.0}
    tokens: dict[Engine, dict[tuple[str, int], tuple[int, ...]]] = {plain: {}, auto: {}}
    sequence_steps = rows = accepted = 0
    while plain.has_work or auto.has_work:
        for engine in (plain, auto):
            if not engine.has_work:
                continue
            began = time.perf_counter()
            results = engine.step()
            seconds[engine] += time.perf_counter() - began
            tokens[engine] |= {(result.uid, result.sample_index): tuple(result.token_ids) for result in results}
            if engine is auto and engine.speculation is not None:
                measure = engine.speculation.last_step
                decoding = len(measure.load.keys)
                sequence_steps += decoding
                rows += measure.draft_rows
                accepted += measure.emitted - decoding
    return {
        "batch": batch,
        "plain_s": round(seconds[plain], 2),
        "auto_s": round(seconds[auto], 2),
        "ratio": round(seconds[plain] / seconds[auto], 3),
        "tokens_per_step": round(1 + accepted / sequence_steps, 3),
        "rows": rows,
        "accepted": accepted,
        "different": sum(tokens[auto][sample] != ids for sample, ids in tokens[plain].items()),
    }


@click.command()
@click.argument("prompts")
@click.argument("out")
@click.option("--batch", default="1,8,16", help="Samples in flight, one run each.")
@click.option("--limit", default=64, help="Prompts.")
@click.option("--temperature", default=0.0)
@click.option("--top-p", default=1.0)
@click.option("--n", default=1, help="Samples of each prompt.")
def main(prompts: str, out: str, batch: str, limit: int, temperature: float, top_p: float, n: int) -> None:
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=temperature, top_p=top_p, n=n, ignore_eos=True)
    job = demo_job(prompts, TOKENS)
    loaded = load_model(job.model)
    work = load_workload(job, loaded, limit=limit, spread=True, max_prompt_chars=1000)
    click.echo("| " + " | ".join(COLUMNS).replace("_", " ") + " |\n" + "|---" * len(COLUMNS) + "|")
    rows = []
    for size in map(int, batch.split(",")):
        rows.append(by_turns(loaded, work, sampling, size))
        click.echo("| " + " | ".join(str(rows[-1][column]) for column in COLUMNS) + " |")
    Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
