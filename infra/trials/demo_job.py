"""The job that trials on the demo model take their prompts from: SmolLM2-135M in bfloat16."""

from __future__ import annotations

from pipeline.config import JobConfig, ModelConfig, SamplingConfig
from pipeline.data_config import InputConfig, OutputConfig


def demo_job(prompts_file: str, max_tokens: int) -> JobConfig:
    return JobConfig(
        model=ModelConfig(id="builtin:smollm2-135m", dtype="bfloat16"),
        input=InputConfig(path=(prompts_file,)),
        output=OutputConfig(path="unused"),
        sampling=SamplingConfig(max_tokens=max_tokens),
    )
