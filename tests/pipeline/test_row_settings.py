"""What rows ask for themselves: values that are used, and sentences for those that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.config import SamplingConfig
from pipeline.config_io import parse_job
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, RowError
from pipeline.prompts import make_prompt, stored_columns, stored_prompt
from pipeline.row_settings import sampling_of, tools_of
from pipeline.shards import plan
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import write_parquet

SOURCE = InputConfig(path=("in",), sampling_column="params", seed_column="n", tools_column="tools")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"params": None, "n": None}, {}),
        ({"params": {"temperature": 0, "top_p": None, "stop": "\n"}}, {"temperature": 0.0, "stop": ("\n",)}),
        ({"params": {"stop": ["a", "b"], "max_tokens": 5.0}}, {"stop": ("a", "b"), "max_tokens": 5}),
        ({"params": '{"top_k": 3, "min_p": 0.1}'}, {"top_k": 3, "min_p": 0.1}),
        ({"n": 7}, {"seed": 7}),
        ({"n": "7"}, {"seed": 7}),
        ({"n": 7, "params": {"seed": 8}}, {"seed": 8}),
    ],
)
def test_sampling_of_a_row(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling_of(values, SOURCE) == expected


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"params": {"top_p": 1.7}}, "params.top_p must be in (0, 1], got 1.7"),
        ({"params": {"max_tokens": 0}}, "params.max_tokens must be at least 1, got 0"),
        ({"params": {"temperature": "hot"}}, "params.temperature must be a number, got 'hot'"),
        ({"params": {"stop": [""]}}, "params.stop must hold no empty string, got ''"),
        (
            {"params": {"n": 2}},
            "params must hold temperature, top_p, top_k, min_p, max_tokens, stop, seed only, got 'n'",
        ),
        ({"params": "[1]"}, "params must be a mapping of keys, got [1]"),
        ({"params": "{oops"}, "params must be JSON where it is text, got '{oops': "),
        ({"n": -1}, "n must be in [0, 2^63), got -1"),
        ({"n": "x"}, "n must be an integer, got 'x'"),
    ],
)
def test_sampling_that_cannot_be_used(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RowError) as caught:
        sampling_of(values, SOURCE)
    assert caught.value.error_type == "invalid_sampling"
    assert str(caught.value).startswith(sentence)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("value", [json.dumps([TOOL]), [TOOL], [{**TOOL, "strict": None}]])
def test_tools_of_a_row(value: Any) -> None:
    assert tools_of({"tools": value}, SOURCE) == (TOOL,)


@pytest.mark.parametrize("value", [None, "[]", []])
def test_rows_without_tools(value: Any) -> None:
    assert tools_of({"tools": value}, SOURCE) is None


@pytest.mark.parametrize("value", ["{}", "[1]", "no", [3]])
def test_tools_that_cannot_be_used(value: Any) -> None:
    with pytest.raises(RowError, match=r"^tools must be ") as caught:
        tools_of({"tools": value}, SOURCE)
    assert caught.value.error_type == "invalid_tools"


def test_an_output_row_tells_what_its_prompt_asked_for() -> None:
    given = {"params": {"temperature": 0.5, "stop": ["x"], "seed": 3}, "tools": [TOOL]}
    prompt = make_prompt(0, "r", "hello", given, SOURCE)
    row = {
        "id": "r",
        "prompt": "hello",
        "messages": None,
        "seed": 3,
        "sampling": {"top_p": None, **given["params"]},
        "tools": json.dumps([TOOL]),
    }
    assert set(stored_columns(SOURCE)) == row.keys()
    again = stored_prompt(row)
    job = SamplingConfig(temperature=1, seed=9, top_p=0.5)
    assert (
        again.sampled_by(job) == prompt.sampled_by(job) == SamplingConfig(temperature=0.5, stop="x", seed=3, top_p=0.5)
    )
    assert again.tools == prompt.tools == (TOOL,)


@pytest.mark.parametrize(
    ("key", "column", "sentence"),
    [
        ("sampling_column", "k", "input.sampling_column must be a struct column or text, got int64 for column 'k'"),
        ("seed_column", "x", "input.seed_column must be an integer column or text, got double for column 'x'"),
        ("tools_column", "k", "input.tools_column must be a list column or text, got int64 for column 'k'"),
        ("seed_column", "sed", "input.seed_column must name columns of the input, got 'sed' for file "),
    ],
)
def test_columns_of_other_types_are_refused(
    tmp_path: Any, make_job: MakeJob, key: str, column: str, sentence: str
) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"], "k": [1], "x": [1.5]})
    with pytest.raises(ConfigError) as caught:
        plan(make_job(f"input.{key}={column}"))
    assert str(caught.value).startswith(sentence)


def test_columns_that_the_output_has_then_are_not_copied(tmp_path: Any, make_job: MakeJob) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"], "tools": ["[]"]})
    assert plan(make_job("output.columns=[tools]")).num_rows == 1
    with pytest.raises(ConfigError, match=r"output\.columns must not name columns that every output has, got 'tools'"):
        plan(make_job("output.columns=[tools]", "input.tools_column=tools"))


def test_columns_of_settings_are_part_of_the_identity_when_they_are_named() -> None:
    plain = {"model": "m", "input": "in", "output": "out"}
    newer = {"columns", "sampling_column", "seed_column", "tools_column", "allow_append"}
    assert not newer & parse_job(plain).identity()["input"].keys()
    named = parse_job(plain, ["input.sampling_column=s", "input.columns={a: b}", "input.allow_append=true"])
    assert named.identity()["input"].items() >= {"sampling_column": "s", "columns": {"a": "b"}}.items()
    assert "allow_append" not in named.identity()["input"]
