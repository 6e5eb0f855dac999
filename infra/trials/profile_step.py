"""Where does the time of a step go, and what is the floor?

    python infra/trials/profile_step.py PROMPTS.parquet OUT.json [--batch 1,8,16]

Runs plain decoding and auto on as many prompts as the batch holds, times the parts of every step that only decodes, and
prints a Markdown table of mean milliseconds. The floor is the bytes that the step must read (weights, and the cached
keys and values of every sequence once) over the read bandwidth that a plain sum reaches on this machine. `linear`
is a forward of as many rows that see no cached column; `attention` is what the real forward takes beyond it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from demo_job import demo_job

import workers.engine as engine_module
from jobs.bench.workload import load_workload
from pipeline.config import EngineConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig
from workers.blocks import Block
from workers.engine import Engine, Request
from workers.huge_pages import HugePages
from workers.kv_cache import KVCache
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner

TOKENS = 128
PARTS = ("forward", "pick", "candidates", "draft", "rest")


def bandwidth() -> float:
    """Bytes per second of reading memory in large pages, as the packed weights lie, the best of a few."""
    numbers = HugePages().copy(torch.ones(1 << 26, dtype=torch.int64))  # 512 MiB
    times = []
    for _ in range(5):
        began = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - began)
    return numbers.numel() * 8 / min(times)


def linear_seconds(runner: ModelRunner, rows: int) -> float:
    """A forward of `rows` single rows of new sequences: next to no attention."""
    cache = KVCache(runner.kv_shape, 1 << 62, max_slots=rows)
    blocks = []
    for _ in range(rows):
        slot = cache.allocate(1)
        assert slot is not None
        blocks.append(Block(slot, 0, (1,), (0,), None, (0,)))
    times = []
    for _ in range(7):
        began = time.perf_counter()
        runner.forward(blocks)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


class Stopwatch:
    """Seconds spent in some functions during the present step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed


def profile(loaded: LoadedModel, decoding: DecodingConfig, prompts: list[tuple[int, ...]]) -> dict[str, float]:
    """Mean milliseconds of the parts of the steps in which all sequences decode, with rows, tokens and columns."""
    engine = Engine(loaded, EngineConfig(max_sequences=len(prompts)), decoding)
    watch = Stopwatch()
    engine.runner.forward = watch.wrap("forward", engine.runner.forward)  # type: ignore[method-assign]
    pick, candidates = engine_module.pick_rows, engine_module.top_candidates
    engine_module.pick_rows = watch.wrap("pick", pick)
    engine_module.top_candidates = watch.wrap("candidates", candidates)
    for i, ids in enumerate(prompts):
        engine.submit(Request(str(i), ids, SamplingConfig(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)))
    sums = dict.fromkeys((*PARTS, "total", "rows", "tokens", "columns", "steps"), 0.0)
    try:
        while engine.has_work:
            watch.seconds = {}
            running = engine.scheduler.running
            decodes = len(running) == len(prompts) and all(sequence.is_decoding for sequence in running)
            columns = sum(sequence.num_cached for sequence in running)
            before = sum(len(sequence.tokens) for sequence in running)
            watched = list(running)
            began = time.perf_counter()
            engine.step()
            total = time.perf_counter() - began
            if not decodes:
                continue
            last = engine.speculation.last_step if engine.speculation else None
            parts = watch.seconds | {"draft": last.draft_s if last else 0.0}
            parts["rest"] = total - sum(parts.values())
            for name in PARTS:
                sums[name] += parts.get(name, 0.0) * 1e3
            sums["total"] += total * 1e3
            sums["rows"] += len(prompts) + (last.draft_rows if last else 0)
            sums["tokens"] += sum(len(sequence.tokens) for sequence in watched) - before
            sums["columns"] += columns
            sums["steps"] += 1
    finally:
        engine_module.pick_rows, engine_module.top_candidates = pick, candidates
    return {name: value / max(1.0, sums["steps"]) for name, value in sums.items() if name != "steps"}


@click.command()
@click.argument("prompts_file")
@click.argument("json_file")
@click.option("--batch", default="1,8,16", show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(prompts_file: str, json_file: str, batch: str, threads: int) -> None:
    torch.set_num_threads(threads)
    job = demo_job(prompts_file, TOKENS)
    loaded = load_model(job.model)
    runner = ModelRunner(loaded.model)
    bandwidths = [bandwidth()]
    weight_bytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    figures: list[dict[str, Any]] = []
    for size in map(int, batch.split(",")):
        work = load_workload(job, loaded, limit=size, spread=True, max_prompt_chars=1000)
        strategies: dict[str, DecodingConfig] = {"plain": AutoregressiveConfig(), "auto": AutoConfig()}
        for name, decoding in strategies.items():
            parts = profile(loaded, decoding, list(work.prompts))
            linear = linear_seconds(runner, round(parts["rows"])) * 1e3
            kv_bytes = parts["columns"] * runner.kv_shape.bytes_per_token
            bandwidths.append(bandwidth())  # it drifts: the floor is that of the better of before and after
            floor = (weight_bytes + kv_bytes) / max(bandwidths[-2:]) * 1e3
            figures.append({"batch": size, "strategy": name, "linear": linear, "floor": floor} | parts)
    with open(json_file, "w") as file:
        json.dump({"bytes_per_s": bandwidths, "weight_bytes": weight_bytes, "steps": figures}, file, indent=1)
    slow, fast = min(bandwidths) / 1e9, max(bandwidths) / 1e9
    print(f"read bandwidth {slow:.1f} to {fast:.1f} GB/s, weights {weight_bytes / 1e6:.0f} MB")
    columns = (
        "rows",
        "tokens",
        "linear",
        "attention",
        "pick",
        "candidates",
        "draft",
        "rest",
        "total",
        "floor",
    )
    print("| batch | strategy | " + " | ".join(columns) + " | reached |\n|" + "---|" * (len(columns) + 3))
    for row in figures:
        row["attention"] = row["forward"] - row["linear"]
        cells = [f"{row[name]:.1f}" if name in ("rows", "tokens") else f"{row[name]:.2f}" for name in columns]
        reached = f"{row['floor'] / row['total']:.0%}"
        print(f"| {row['batch']} | {row['strategy']} | " + " | ".join(cells) + f" | {reached} |")


if __name__ == "__main__":
    main()
