"""What an adapter gains, by mode and number of branches: ptp_modes.py MODEL ADAPTER PROMPTS [ROUNDS]

All engines are of one process and take turns, one sample at a time, as machines have slow and fast minutes. Samples are
drawn as the adapter says and end where they end in a job; all outputs are compared with those of plain decoding.
"""

from __future__ import annotations

import sys
import time

import pyarrow.parquet as pq
import torch

from pipeline.adapter_config import read_adapter_config
from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoregressiveConfig, DecodingConfig, PTPConfig
from workers.engine import Engine, Request
from workers.model_loading import load_model

PROMPTS, TOKENS = 16, 96


def main(model: str, adapter: str, prompts: str, rounds: str = "3") -> None:
    torch.set_num_threads(2)
    loaded = load_model(ModelConfig(id=model, dtype="bfloat16"))
    adapt = read_adapter_config(adapter).adapt.sampling()
    sampling = SamplingConfig.model_validate({**adapt.model_dump(), "max_tokens": TOKENS, "seed": 17})
    requests = []
    for row in pq.read_table(prompts).slice(0, PROMPTS).to_pylist():
        message = [{"role": "user", "content": row["prompt"]}]
        ids = loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        requests.append(Request(row["id"], tuple(ids), sampling))
    decodings: dict[str, DecodingConfig] = {"plain": AutoregressiveConfig()}
    decodings |= {f"one pass, {n} branches": PTPConfig(adapter=adapter, branches=n) for n in (1, 2, 3)}
    decodings["serial"] = PTPConfig(adapter=adapter, mode="serial")
    engines = {name: Engine(loaded, EngineConfig(max_sequences=1), config) for name, config in decodings.items()}
    seconds, steps = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    outputs = {}
    for _ in range(int(rounds)):
        for name, engine in engines.items():
            began = time.perf_counter()
            results = engine.generate(requests)
            seconds[name] += time.perf_counter() - began
            outputs[name] = [result.token_ids for result in results]
            steps[name] = sum(result.stats.num_steps for result in results)
    tokens = sum(map(len, outputs["plain"]))
    for name in engines:
        same = sum(a == b for a, b in zip(outputs[name], outputs["plain"], strict=True))
        rate, gain = tokens * int(rounds) / seconds[name], seconds["plain"] / seconds[name]
        print(f"{name:22} {tokens / steps[name]:.2f} tokens/step {rate:6.0f} tokens/s {gain:.2f} of plain", end="")
        print(f", {same} of {PROMPTS} outputs the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
