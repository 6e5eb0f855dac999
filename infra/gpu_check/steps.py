"""Milliseconds of a decode step over batch and rows per sequence, behind 512 cached columns, for each way to run it.

usage: steps.py MODEL JSON cuda|cpu BATCH,BATCH,..
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from pathlib import Path

from pipeline.config import ModelConfig
from workers.blocks import Block, prompt_block
from workers.cuda_graphs import CAPTURE_AT
from workers.kv_cache import KVCache
from workers.model_loading import load_model
from workers.model_runner import ModelRunner

COLUMNS = 512
ROWS = (1, 2, 4, 8, 16)
REPEATS = 12
WAYS = {"dense": "off", "flash": "off", "graphs": "auto"}
"""Way -> engine.compile; dense is the backend without flash attention."""


def milliseconds(runner: ModelRunner, blocks: list[Block]) -> float:
    times = []
    for _ in range(REPEATS + CAPTURE_AT + 1):
        began = time.perf_counter()
        runner.forward(blocks)[0, 0].item()  # waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[CAPTURE_AT + 1 :])


def main(model: str, path: str, device: str, batches: str) -> None:
    logging.basicConfig(level=logging.INFO)
    loaded = load_model(ModelConfig.model_validate({"id": model, "dtype": "bfloat16", "device": device}))
    results: list[dict[str, object]] = []
    for way, compile in WAYS.items():
        runner = ModelRunner(loaded.model, compile)  # type: ignore[arg-type]
        if way == "dense":
            runner.varlen = None
        elif runner.varlen is None or (way == "graphs" and not runner.bucket_edges):
            results.append({"way": way, "error": "not available here"})
            continue
        for batch in map(int, batches.split(",")):
            cache = KVCache(runner.kv_shape, 1 << 62, max_slots=batch)
            slots = [slot for _ in range(batch) if (slot := cache.allocate(COLUMNS + max(ROWS) + 1))]
            for rows in ROWS:
                blocks = [prompt_block(slot, COLUMNS, (5,) * rows, sampled=True) for slot in slots]
                took = milliseconds(runner, blocks)
                results.append({"way": way, "batch": batch, "rows": rows, "ms": round(took, 4)})
                Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
