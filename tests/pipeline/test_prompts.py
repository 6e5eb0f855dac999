from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config_io import parse_job
from pipeline.errors import ConfigError
from pipeline.prompts import Prompt, read_prompts, template_columns
from pipeline.shards import plan
from tests.pipeline.makers import write_jsonl, write_parquet

HI = {"role": "user", "content": "hi"}
BE_NICE = {"role": "system", "content": "be nice"}


def prompts(path: str, *columns: str, **options: Any) -> list[Prompt]:
    output = {"path": "out", "columns": list(columns)}
    config = parse_job({"model": "m", "input": {"path": path, **options}, "output": output})
    return [p for shard in plan(config).shards for p in read_prompts(shard, config.input, config.output.columns)]


def outcomes(path: str, **options: Any) -> list[Any]:
    """What each row gives: its prompt, its messages, or the error's type."""
    return [p.error.error_type if p.error else p.prompt or list(p.messages or ()) for p in prompts(path, **options)]


def test_a_string_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["one", None, "", "two"], "n": [1, 2, 3, 4]})
    assert outcomes(path) == ["one", "null_prompt", "empty_prompt", "two"]
    rows = prompts(path, "n")
    assert [(p.row, p.uid, p.passthrough) for p in rows] == [(i, f"a.parquet:{i}", {"n": i + 1}) for i in range(4)]
    assert str(rows[1].error) == "the prompt is null in column messages / prompt / text"
    assert str(rows[2].error) == "the prompt is empty"


def test_a_messages_column(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
    rows = [[{**HI, "name": "x"}], [], None, [BE_NICE, HI], [{"role": "user", "content": None}], [None]]
    path = write_parquet(tmp_path / "a.parquet", {"messages": pa.array(rows, kind)})
    bad = "invalid_messages"
    assert outcomes(path) == [[HI], "empty_prompt", "null_prompt", [BE_NICE, HI], bad, bad]
    assert str(prompts(path)[4].error) == "content of message 0 must be a string, got None"
    assert str(prompts(path)[5].error) == "message 0 must have a role and a content, got None"


def test_the_first_default_column_that_is_not_null_counts(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    columns = {"text": ["t", "t"], "prompt": ["p", "p"], "messages": pa.array([[HI], None], kind)}
    path = write_parquet(tmp_path / "a.parquet", columns)
    assert outcomes(path) == [[HI], "p"]
    assert outcomes(path, prompt_column="text") == ["t", "t"]


def test_json_rows_of_any_shape(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": 5}, {"prompt": [HI]}, {"prompt": ["x"]}, {"other": 1}, "{"]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    expected = ["a", "invalid_prompt", [HI], "invalid_messages", "null_prompt", "invalid_json"]
    assert outcomes(path) == expected
    assert str(prompts(path)[1].error) == "a prompt must be a string or a messages list, got 5"


def test_a_system_prompt_goes_first_unless_there_is_one(tmp_path: Path) -> None:
    rows = [{"prompt": "hi"}, {"prompt": [HI]}, {"prompt": [{"role": "system", "content": "own"}, HI]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    own = [{"role": "system", "content": "own"}, HI]
    assert outcomes(path, system_prompt="be nice") == [[BE_NICE, HI], [BE_NICE, HI], own]


def test_templates(tmp_path: Path) -> None:
    columns = {"question": ["why", None, "how"], "hints": [["a", "b"], [], ["c"]], "n": [1, 0, 2]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    template = "Q: {{ question }}{% for hint in hints %} ({{ hint }}){% endfor %}\n"
    assert outcomes(path, prompt_template=template) == ["Q: why (a) (b)\n", "template_error", "Q: how (c)\n"]
    assert str(prompts(path, prompt_template=template)[1].error) == "the prompt template failed: a value is null"
    guarded = "{{ question or 'nothing' }} {{ 6 // n }}"
    assert outcomes(path, prompt_template=guarded) == ["why 6", "template_error", "how 3"]
    assert outcomes(path, prompt_template="{{ question or '' }}") == ["why", "empty_prompt", "how"]


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"question": ["why"]})
    assert outcomes(path, prompt_template="{{ question.__class__.__mro__ }}") == ["template_error"]
    assert outcomes(path, prompt_template="{{ range(10**9) | list }}{{ question }}") == ["template_error"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ hints }}{{ cycler.__init__.__globals__.os }}", "attribute '__init__' of 'type' object is unsafe"),
        ("{{ hints | attr('__class__') }}", "attribute '__class__' of 'list' object is unsafe"),
        ("{{ '{0.__class__}'.format(hints) }}", "attribute '__class__' of 'list' object is unsafe"),
        ("{{ hints.append('c') }}", "attribute 'append' of 'list' object is unsafe"),
        ("{% import 'os' as os %}{{ hints }}", "no loader for this environment specified"),
        ("{{ hints[0] * 10**9 }}", r"** would make more than a prompt can hold"),
        ("{{ hints[0] * 999999999 }}", r"* would make more than a prompt can hold"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{{ hints }}{% endfor %}{% endfor %}",
            "it writes more than 16,777,216 characters",
        ),
    ],
)
def test_templates_cannot_reach_python_nor_fill_the_memory(tmp_path: Path, template: str, reason: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"hints": [["a", "b"]]})
    (prompt,) = prompts(path, prompt_template=template)
    assert prompt.error is not None
    assert prompt.error.error_type == "template_error"
    assert reason in str(prompt.error)


def test_templates_may_repeat_strings_and_multiply_numbers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"n": [7]})
    assert outcomes(path, prompt_template="{{ '=' * n }} {{ n * 10000000000 }}") == ["======= 70000000000"]


def test_template_columns() -> None:
    assert template_columns("{{ a }} {% for x in b %}{{ x }}{{ range(3) }}{% endfor %}") == ("a", "b")
    with pytest.raises(ConfigError) as raised:
        template_columns("{{ a")
    where = "unexpected end of template, expected 'end of print statement'. (line 1)"
    assert str(raised.value) == f"input.prompt_template must be a Jinja template, got '{{{{ a': {where}"


def test_ids(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b"], "key": [7, 8]})
    assert [p.uid for p in prompts(path, id_column="key")] == ["7", "8"]
    body = {"messages": [HI]}
    batch = write_jsonl(tmp_path / "b.jsonl", [{"custom_id": "r1", "body": body}, {"custom_id": "r2", "body": body}])
    assert [(p.uid, list(p.messages or ())) for p in prompts(batch)] == [("r1", [HI]), ("r2", [HI])]


def test_unreadable_rows_have_file_and_row_as_id_and_null_passthrough(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "key": "k", "n": 1}, "{"])
    rows = prompts(path, "n", id_column="key")
    assert [(p.uid, p.passthrough) for p in rows] == [("k", {"n": 1}), ("a.jsonl:1", {"n": None})]
