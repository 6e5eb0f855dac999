"""What a job stores for its report: traces where they are asked for, times and occupancy of every shard."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from jobs.reporting.contents import report
from pipeline.commit_log import decoded, encoded
from pipeline.commits import JobStore
from pipeline.parts import read_part_rows
from pipeline.preparation import prepare

PROMPTS = [*[f"seven leagues, seven leagues, seven leagues, number {i}" for i in range(7)], None]


def rows_of(job: Any) -> list[dict[str, Any]]:
    receipts = JobStore(str(job.output)).committed().values()
    return [row for receipt in receipts for row in read_part_rows(str(job.output / receipt.path), [])]


def test_a_trace_says_who_drafted_what(make_job: Callable[..., Any], run_here: Callable[[Any], None]) -> None:
    began = time.time()
    sampling = {"max_tokens": 100, "temperature": 0.0}
    job = make_job(PROMPTS, output={"trace": True}, sampling=sampling, decoding={"strategy": "suffix", "min_window": 4})
    run_here(job)
    rows = rows_of(job)
    tokenizer = AutoTokenizer.from_pretrained(yaml.safe_load(job.file.read_text())["model"]["id"])
    assert sum(row["num_accepted_draft_tokens"] for row in rows) > 20
    for row in rows[:7]:
        by_drafter: Counter[str] = Counter()
        for span in row["draft_spans"]:
            by_drafter[span["drafter"]] += span["length"]
            said = row["generation"][span["text_start"] : span["text_start"] + span["text_length"]]
            tokens = row["completion_token_ids"][span["start"] : span["start"] + span["length"]]
            alone = tokenizer.decode(tokens, skip_special_tokens=True)
            assert said == alone or "\ufffd" in said + alone  # bytes that are no character, as a random model says
        assert by_drafter == {pair["drafter"]: pair["accepted"] for pair in row["accepted_by_drafter"]}
    assert rows[7]["draft_spans"] is None

    receipts = list(JobStore(str(job.output)).committed().values())
    stats = [receipt.stats for receipt in receipts]
    classes = [c for receipt in receipts for c in receipt.occupancy]
    # The first token of a sample comes with its prompt, in a step in which it is not decoding yet.
    assert sum(c.sequence_steps for c in classes) == sum(s.num_steps for s in stats) - 7
    assert sum(c.draft_rows for c in classes) == sum(s.num_draft_tokens for s in stats)
    assert sum(c.accepted for c in classes) == sum(s.num_accepted_draft_tokens for s in stats)
    assert all(c.at_least <= 4 for c in classes)
    assert all(began <= r.worker_began <= r.began <= r.began + r.seconds <= time.time() for r in receipts)
    assert [decoded(encoded(receipt)) for receipt in receipts] == receipts
    assert "null_prompt" in report(str(job.output))


def test_without_a_trace_a_job_is_what_it_was(make_job: Callable[..., Any], run_here: Callable[[Any], None]) -> None:
    job = make_job(PROMPTS[:2])
    run_here(job)
    assert "draft_spans" not in rows_of(job)[0]
    assert "trace" not in JobStore(str(job.output)).load_config().identity()["output"]


def test_receipts_of_earlier_versions_are_read(make_job: Callable[..., Any], run_here: Callable[[Any], None]) -> None:
    import json

    job = make_job(PROMPTS[:2])
    run_here(job)
    (receipt,) = JobStore(str(job.output)).committed().values()
    fields = {
        name: value
        for name, value in json.loads(encoded(receipt)).items()
        if name not in ("began", "worker_began", "occupancy")
    }
    old = decoded(json.dumps(fields).encode())
    assert (old.began, old.worker_began, old.occupancy) == (0.0, 0.0, ())


def test_a_trace_is_part_of_what_a_job_is(make_job: Callable[..., Any], run_here: Callable[[Any], None]) -> None:
    from pipeline.config_io import load_job
    from pipeline.errors import ConfigError

    job = make_job(PROMPTS[:2])
    run_here(job)
    with pytest.raises(ConfigError, match=r"output\.trace was absent and is true now"):
        prepare(load_job(str(job.file), ["output.trace=true"]))
