"""What a job will take, in figures and sentences, for `run --dry-run` and `preview`. Measured by `calibration`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jobs.durations import duration
from pipeline.config import JobConfig
from pipeline.shards import Plan

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """Lengths in tokens of the prompts among the sampled rows, and what is wrong with the other rows."""

    sampled: int
    lengths: tuple[int, ...]
    errors: dict[str, int]
    max_context: int

    @property
    def num_over_context(self) -> int:
        """Prompts that leave no room for one new token."""
        return sum(length >= self.max_context for length in self.lengths)

    def served_share(self, config: JobConfig) -> float:
        """Rows that will be decoded, as a share of all."""
        refused = self.num_over_context if config.input.on_too_long == "error" else 0
        return (len(self.lengths) - refused) / self.sampled if self.sampled else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What this machine did in a few seconds. `num_bytes` are those of the finished samples as Parquet."""

    seconds: float
    tokens: int
    num_finished: int
    num_bytes: int
    tokens_per_step: float
    machine: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A whole job, if its rows are as those that were measured. `num_bytes` is None where no sample has finished."""

    tokens_per_sample: float
    worker_seconds: float
    num_bytes: float | None


def plan_lines(config: JobConfig, plan: Plan) -> Iterator[str]:
    """How much there is to do."""
    yield (
        f"{plan.num_rows:,} rows of {len(plan.files):,} files, in {len(plan.shards):,} shards; "
        f"{config.sampling.n:,} samples of each."
    )


def prompt_lines(config: JobConfig, figures: PromptFigures) -> Iterator[str]:
    """What the sampled rows are like."""
    lengths = figures.lengths
    if lengths:
        shown = ", ".join(f"{p} % {round(float(np.percentile(lengths, p))):,}" for p in PERCENTILES)
        yield (
            f"Prompt tokens, in {figures.sampled:,} sampled rows: mean {np.mean(lengths):,.0f}, {shown}, "
            f"longest {max(lengths):,}."
        )
    if figures.num_over_context:
        fate = "become error rows" if config.input.on_too_long == "error" else "lose their oldest tokens"
        yield (
            f"{figures.num_over_context:,} of them leave no room in the context of {figures.max_context:,} tokens: "
            f"they {fate}."
        )
    for error_type, count in sorted(figures.errors.items()):
        yield f"{count:,} of them become error rows: {error_type}."


def projected(measured: Calibration, config: JobConfig, rows: float) -> Estimate:
    """The whole job. A sample has as many tokens as there were for each one that ended, but at most max_tokens.

    That is the likeliest mean if samples end at a constant rate; samples that the measurement cut short are in it.
    Worked example: 900 tokens, 3 samples finished, in 9 s, 1000 rows: 300 tokens a sample, 3000 worker-seconds.
    """
    longest = config.sampling.max_tokens
    per_sample = min(longest, measured.tokens / measured.num_finished) if measured.num_finished else longest
    samples = rows * config.sampling.n
    seconds = samples * per_sample * measured.seconds / max(1, measured.tokens)
    num_bytes = samples * measured.num_bytes / measured.num_finished if measured.num_finished else None
    return Estimate(per_sample, seconds, num_bytes)


def calibration_lines(config: JobConfig, rows: float, measured: Calibration) -> Iterator[str]:
    """What was measured, and what follows from it for a job of so many rows that can be served."""
    estimate = projected(measured, config, rows)
    yield (
        f"Calibration on {measured.machine}: {measured.tokens / measured.seconds:,.1f} tokens/s in "
        f"{measured.seconds:.1f} s, {measured.tokens_per_step:.2f} tokens a step; {measured.num_finished:,} samples "
        "ended."
    )
    cluster = config.cluster
    hours = estimate.worker_seconds / 3600
    times = ", ".join(
        f"{duration(estimate.worker_seconds / count)} with {count} worker{'s' * (count > 1)}"
        for count in sorted({cluster.min_workers, cluster.max_workers})
    )
    yield (
        f"Expected, if workers are as fast as this machine: {estimate.tokens_per_sample:,.0f} tokens a sample, "
        f"{times}; {hours:,.2f} worker-hours."
    )
    if cluster.gpus_per_replica:
        yield f"That is {hours * cluster.gpus_per_replica:,.2f} GPU-hours."
    if estimate.num_bytes is not None:
        yield f"Size of the output: about {size(estimate.num_bytes)}."


def size(num_bytes: float) -> str:
    """Worked example: 2_500_000 is `2.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"
