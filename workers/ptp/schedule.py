"""The learning rate over a training."""

from __future__ import annotations

import math

from pipeline.train_config import LoopConfig

COSINE_END = 0.1
"""Where the cosine ends, as a share of the peak."""


def learning_rate(step: int, seconds: float, config: LoopConfig) -> float:
    """The rate of step number `step` (from 0), `seconds` of training after its start.

    A linear rise over `warmup_steps`, then constant, or a cosine down to a tenth. Where `max_seconds` is given too,
    whichever of the two ends comes nearer sets how far the cosine is.

    Worked example: lr 1, 4 warm-up steps of 12, cosine: .25 .5 .75 1 at steps 0..3, 0.55 at step 8.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    if config.max_seconds is not None:
        done = max(done, seconds / config.max_seconds)
    cosine = (1.0 + math.cos(math.pi * min(done, 1.0))) / 2.0
    return config.lr * (COSINE_END + (1.0 - COSINE_END) * cosine)
