"""OpenAI batch files: what their bodies ask for is obeyed, and what cannot be is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pipeline.config_io import parse_job
from pipeline.openai_requests import flat_request
from pipeline.prompts import read_prompts
from pipeline.shards import plan
from tests.pipeline.makers import write_jsonl

HI = [{"role": "user", "content": "hi"}]


def request(uid: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": uid, "method": "POST", "url": "/v1/chat", "body": {"model": "m", "messages": HI, **body}}


def job(path: str, **source: Any) -> Any:
    return parse_job({"model": "m", "input": {"path": path, **source}, "output": "out"})


def test_a_request_as_a_row() -> None:
    row = flat_request(request("a", top_p=0.5, max_tokens=7, max_completion_tokens=9, n=2))
    assert (row["custom_id"], row["messages"], row["n"]) == ("a", HI, 2)
    assert row["body"] == {"top_p": 0.5, "max_tokens": 9}
    assert flat_request({"custom_id": "b", "body": None}) == {"custom_id": "b", "body": {}}


def test_parameters_of_the_body_are_those_of_the_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        request("a", temperature=0, stop="END", n=2, user="me"),
        request("b", max_completion_tokens=9, seed=None, response_format={"type": "text"}),
        request("c", top_p=3, n=1),
        request("d"),
    ]
    config = job(write_jsonl(tmp_path / "in.jsonl", lines), format="openai_batch")
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        (shard,) = plan(config).shards
    assert [record.getMessage() for record in caplog.records] == [
        "parameters in the bodies of requests are not obeyed (docs/input.md): n, response_format"
    ]
    a, b, c, d = read_prompts(shard, config.input, ())
    assert a.sampling == {"temperature": 0.0, "stop": ("END",)}
    assert b.sampling == {"max_tokens": 9}
    assert str(c.error) == "body.top_p must be in (0, 1], got 3"
    assert (d.sampling, d.error) == ({}, None)


def test_files_that_are_told_by_their_lines_have_the_sampling_of_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan is the first to know what they are, when the identity of the job is settled."""
    path = write_jsonl(tmp_path / "in.jsonl", [request("a", temperature=0)])
    config = job(path)
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        (shard,) = plan(config).shards
    assert "not obeyed (docs/input.md): temperature" in caplog.text
    (prompt,) = read_prompts(shard, config.input, ())
    assert (prompt.sampling, prompt.error) == ({}, None)
    assert job(path, sampling_column="body").input.sampling_column == "body"
    assert job(path, format="openai_batch", sampling_column="mine").input.sampling_column == "mine"
