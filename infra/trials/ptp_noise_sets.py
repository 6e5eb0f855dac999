"""Accepted drafts over sets of noise M and the length of stretches, in the engine:

    ptp_noise_sets.py BASE ADAPTER STRETCHES JSON       # STRETCHES: 4,8

Windows are as long as the adapter allows, in every step and for every set. Prompts are a token of the vocabulary each.
Standard errors are of the mean over samples.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import PTPConfig
from pipeline.errors import ConfigError
from workers.drafters.build import adapter_of
from workers.engine import Engine, Request
from workers.model_loading import load_model

SETS = (1, 2, 4, 8)
SAMPLES = 64
TOKENS = 96


def main(base: str, adapter_folder: str, stretches: str, json_file: str) -> None:
    loaded = load_model(ModelConfig(id=base))
    adapter = adapter_of(PTPConfig(adapter=adapter_folder), loaded)
    assert adapter is not None
    slots = adapter.config.slots
    params = adapter.config.adapt.sampling()
    figures = []
    for sets in SETS:
        for stretch in map(int, stretches.split(",") if sets > 1 else ["1"]):
            changes = {"noise_sets": sets, "noise_stretch": stretch, "max_tokens": TOKENS, "ignore_eos": True}
            sampling = SamplingConfig.model_validate(params.model_dump() | changes)
            window = sets * slots
            decoding = PTPConfig(
                adapter=adapter_folder, mode="serial", min_window=window, max_window=window, max_draft_rows=32 * window
            )
            limits = EngineConfig(max_sequences=32, max_tokens_per_step=32 * (window + 1))
            requests = [
                Request(f"row-{i}", (i % adapter.config.base_shape.vocabulary,), sampling) for i in range(SAMPLES)
            ]
            stats = [result.stats for result in Engine(loaded, limits, decoding).generate(requests)]
            means = [one.num_accepted_draft_tokens / one.num_steps for one in stats]
            error = statistics.stdev(means) / len(means) ** 0.5
            figures.append({"sets": sets, "stretch": stretch, "accepted": statistics.fmean(means), "error": error})
            print(f"M {sets}  stretch {stretch:2}  accepted {figures[-1]['accepted']:.3f} +- {error:.3f}", flush=True)
    Path(json_file).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
