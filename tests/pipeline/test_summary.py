from __future__ import annotations

from pipeline.summary import summarise
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import STATS, make_receipt


def test_summaries_pool_counts(make_job: MakeJob) -> None:
    receipts = [make_receipt(0), make_receipt(1, errors={"empty_prompt": 1})]
    summary = summarise(receipts, None, make_job(), "interrupted")
    assert (summary.rows_ok, summary.rows_failed, summary.completion_tokens) == (2, 2, 10)
    assert summary.errors == {"null_prompt": 1, "empty_prompt": 1}
    assert summary.stats == STATS + STATS
    empty = summarise([], None, make_job(), "planned").to_json()
    assert (empty["tokens_per_step"], empty["mean_acceptance_length"]) == (0.0, 1.0)
