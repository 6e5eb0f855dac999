"""What a report says: everything that storage tells, gathered for the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jobs.reporting.comparison import compare_samples, compared_figures, compared_groups, differing_settings
from jobs.reporting.cost import Cost, cost_of
from jobs.reporting.page import render
from jobs.reporting.row_figures import RowFigures, histogram, row_figures
from jobs.reporting.samples import LONGEST_TEXT, packed, read_samples
from jobs.reporting.stored_job import StoredJob, read_job
from jobs.reporting.timeline import timeline
from pipeline.config_io import dump_job
from pipeline.quality import CUT_OFF_SHARE, LOOPING_SHARE
from pipeline.records import PartReceipt


def report(output: str, against: str | None = None, price: float | None = None) -> str:
    """The page about a job, as HTML. Raises ConfigError where one of the outputs holds no job."""
    job = read_job(output)
    rows, samples, cost = row_figures(job), read_samples(job), cost_of(job, price)
    comparison, other_figures = None, None
    if against is not None:
        other = read_job(against)
        other_rows, other_cost = row_figures(other), cost_of(other, price)
        comparison = {
            "output": other.shown_output,
            "lines": compared_figures(job, other, cost, other_cost),
            "groups": compared_groups(rows, other_rows),
            "settings": differing_settings(job, other),
            "verdicts": compare_samples(samples, other),
        }
        other_figures = chart_figures(other, other_rows)
    data, longest = packed(samples.rows)
    figures = {**chart_figures(job, rows), "against": other_figures}
    return render(
        figures,
        data,
        job=job,
        summary=job.summary,
        rows=rows,
        cost=cost,
        times=figures["times"],
        lengths={"prompt": figures["prompt_tokens"], "completion": figures["completion_tokens"]},
        latencies=rows.latency_percentiles(),
        drafters=_drafters(job),
        notes=list(_notes(job, cost)),
        num_samples=len(samples.rows),
        total_samples=samples.total,
        cut_to=longest if longest < LONGEST_TEXT else None,
        comparison=comparison,
        config=dump_job(job.config),
    )


def chart_figures(job: StoredJob, rows: RowFigures) -> dict[str, Any]:
    """What the charts are drawn from: plain numbers and names."""
    stats = job.summary.stats
    return {
        "output": job.shown_output,
        "times": timeline(job),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "window_histogram": list(stats.window_histogram),
        "occupancy": pooled_occupancy(job.receipts, job.config.engine.max_sequences),
        "prompt_tokens": histogram(rows.prompt_tokens),
        "completion_tokens": histogram(rows.completion_tokens),
        "drafters": [name for name, *_ in _drafters(job)],
    }


def pooled_occupancy(receipts: Iterable[PartReceipt], max_sequences: int) -> list[dict[str, Any]]:
    """By how many samples decoded at once: steps, draft rows of a sample in a step, and tokens per step of a sample."""
    pooled: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for receipt in receipts:
        for c in receipt.occupancy:
            for i, value in enumerate((c.steps, c.sequence_steps, c.draft_rows, c.accepted)):
                pooled[c.at_least][i] += value
    return [
        {
            "from": at_least,
            "to": max(at_least, min(2 * at_least - 1, max_sequences)),
            "steps": steps,
            "window": draft_rows / sequence_steps,
            "tokens_per_step": 1 + accepted / sequence_steps,
        }
        for at_least, (steps, sequence_steps, draft_rows, accepted) in sorted(pooled.items())
    ]


def _drafters(job: StoredJob) -> list[tuple[str, int, float]]:
    """(name, accepted tokens, share of all new tokens), the model's own tokens last."""
    stats = job.summary.stats
    total = max(stats.completion_tokens, 1)
    named = sorted(stats.accepted_by_drafter.items(), key=lambda item: (-item[1], item[0]))
    return [(name, count, count / total) for name, count in named if count] if stats.num_steps else []


def _notes(job: StoredJob, cost: Cost) -> Iterable[str]:
    """What a reader should know before the figures."""
    summary, receipts = job.summary, job.receipts
    delivered = max(summary.rows_ok, 1)
    if summary.state != "done":
        yield (
            f"This job is {summary.state}: {summary.shards_committed:,} of {summary.shards_total:,} shards are "
            "committed, and all figures are about these."
        )
        if job.message:
            yield f"The driver ended with: {job.message}"
    if summary.num_looping > LOOPING_SHARE * delivered:
        yield f"End in a loop, the same piece over and over: {summary.num_looping:,} of {delivered:,} outputs."
    if not job.config.sampling.ignore_eos and summary.num_cut_off > CUT_OFF_SHARE * delivered:
        most = job.config.sampling.max_tokens
        yield f"Cut off at sampling.max_tokens ({most:,}): {summary.num_cut_off:,} of {delivered:,} outputs."
    untimed = len(receipts) - len(job.timed_receipts)
    if untimed:
        yield (
            f"{untimed:,} shards were made by a version that did not store when: they are missing from all figures "
            "about time and cost."
        )
    if cost.unit == "worker" and cost.price is not None:
        yield "The job has no GPUs, so the price is taken for an hour of one worker."
