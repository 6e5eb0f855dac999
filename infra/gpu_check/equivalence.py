"""`auto` against plain decoding on the device, token for token: float32 must be equal, bfloat16 is told.

usage: equivalence.py MODEL PROMPTS JSON cuda|cpu NEW_TOKENS
"""

from __future__ import annotations

import json
import logging
import sys
from itertools import islice
from pathlib import Path

from jobs.preview import first_prompts
from pipeline.config import EngineConfig, SamplingConfig
from pipeline.config_io import parse_job
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model
from workers.rendering import make_renderer

PROMPTS = 12


def tokens_of(
    loaded: LoadedModel, requests: list[Request], decoding: DecodingConfig, batch: int, compile: str
) -> tuple[list[tuple[int, ...]], dict[str, object]]:
    engine = Engine(loaded, EngineConfig.model_validate({"max_sequences": batch, "compile": compile}), decoding)
    tokens = [result.token_ids for result in engine.generate(requests)]
    stats = engine.stats
    facts = {"drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_draft_tokens}
    return tokens, facts | {"flash": engine.runner.varlen is not None, "graphs": bool(engine.runner.bucket_edges)}


def main(model: str, prompts: str, path: str, device: str, new_tokens: str) -> int:
    logging.basicConfig(level=logging.INFO)
    rows: list[dict[str, object]] = []
    for dtype in ("float32", "bfloat16"):
        data = {"model": {"id": model, "dtype": dtype, "device": device}, "input": {"path": prompts}}
        job = parse_job(data | {"output": {"path": "unused"}}, [])
        loaded = load_model(job.model)
        renderer = make_renderer(loaded, job)
        chosen = list(islice(first_prompts(job), PROMPTS))
        for temperature in (0.0, 0.8):
            sampling = SamplingConfig(temperature=temperature, max_tokens=int(new_tokens), ignore_eos=True)
            requests = [Request(p.uid, renderer.token_ids(p, sampling.max_tokens), sampling) for p in chosen]
            plain, _ = tokens_of(loaded, requests, AutoregressiveConfig(), 8, "off")
            for compile in ("off", "auto"):
                auto, facts = tokens_of(loaded, requests, AutoConfig(), 8, compile)
                same = sum(a == b for a, b in zip(auto, plain, strict=True)) / len(plain)
                rows.append({"dtype": dtype, "temperature": temperature, "compile": compile, "same": same} | facts)
                Path(path).write_text(json.dumps(rows))
    return int(any(row["same"] != 1.0 for row in rows if row["dtype"] == "float32"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
