"""The public face: `run_job` runs or resumes a job, `JobConfig` is a job, `Engine` generates in this process.

    import sevenleague

    summary = sevenleague.run_job({"model": "builtin:smollm2-135m", "input": "prompts.parquet", "output": "out/mine"})
    results = sevenleague.Engine("builtin:smollm2-135m").generate(["One step"], {"max_tokens": 32})

Names are looked up when they are first used: importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.run import run_job
    from pipeline.config import JobConfig, SamplingConfig
    from workers.generation import Generation
    from workers.in_process import Engine

__all__ = ["Engine", "Generation", "JobConfig", "SamplingConfig", "run_job"]

_HOMES = {
    "Engine": "workers.in_process",
    "Generation": "workers.generation",
    "JobConfig": "pipeline.config",
    "SamplingConfig": "pipeline.config",
    "run_job": "jobs.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
