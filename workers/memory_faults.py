"""When a device runs out of memory: how that shows, and how much less is taken on afterwards."""

from __future__ import annotations

import gc
import traceback

import torch

from pipeline.config import EngineConfig

FEWEST_TOKENS_PER_STEP = 16
"""An engine of one sequence whose steps are this short can take on no less."""
_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""How allocators tell that have no exception of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def let_go(error: BaseException) -> None:
    """Memory of an engine that is given up goes before the next one takes its own; frames of its error hold some."""
    traceback.clear_frames(error.__traceback__)
    if is_out_of_memory(error):
        gc.collect()
        torch.cuda.empty_cache()


def admission(engine: EngineConfig, halvings: int) -> EngineConfig:
    """An engine's limits, halved so many times: sequences, rows of a step, and KV memory where it is set.

    Worked example: 16 sequences, 1024 rows and 8 GiB, halved 5 times, are 1 sequence, 32 rows and 256 MiB.
    """
    if halvings == 0:
        return engine
    fewest = min(engine.max_tokens_per_step, FEWEST_TOKENS_PER_STEP)
    return engine.model_copy(
        update={
            "max_sequences": max(1, engine.max_sequences >> halvings),
            "max_tokens_per_step": max(fewest, engine.max_tokens_per_step >> halvings),
            "kv_memory_gb": None if engine.kv_memory_gb is None else engine.kv_memory_gb / 2**halvings,
        }
    )
