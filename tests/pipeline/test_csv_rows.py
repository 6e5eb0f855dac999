"""CSV files: the rows that Python's csv module reads, in shards of any size, and errors where a record is broken."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config_io import parse_job
from pipeline.csv_rows import records
from pipeline.errors import ConfigError, PermanentError
from pipeline.prompts import read_prompts
from pipeline.readers import read_rows
from pipeline.shards import plan

FIELDS = st.text(st.sampled_from(list("ab,\"\n\r\t ü5'")), max_size=6)


def rows_of(path: Path, rows_per_shard: int, *columns: str, **options: Any) -> list[list[Any]]:
    """By shard, (row number, values or error type)."""
    output = {"path": "out", "rows_per_shard": rows_per_shard}
    config = parse_job({"model": "m", "input": {"path": str(path), **options}, "output": output})
    return [
        [
            (row.number, row.error.error_type if row.error else row.values)
            for row in read_rows(shard, config.input, columns)
        ]
        for shard in plan(config).shards
    ]


@settings(max_examples=60, deadline=None)
@given(
    table=st.lists(st.tuples(FIELDS, FIELDS.filter(bool)), min_size=1, max_size=8),
    rows_per_shard=st.integers(1, 5),
    ends=st.sampled_from(["\n", "\r\n"]),
)
def test_shards_hold_what_the_csv_module_reads(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]], rows_per_shard: int, ends: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator=ends, quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "note"), *table])
    shards = rows_of(path, rows_per_shard, "text", "note")
    expected = [(i, {"text": text or None, "note": note}) for i, (text, note) in enumerate(table)]
    assert [row for shard in shards for row in shard] == expected
    assert [len(shard) for shard in shards[:-1]] == [rows_per_shard] * (len(shards) - 1)


@pytest.mark.parametrize("rows_per_shard", [1, 2, 3, 100])
def test_broken_records_become_error_rows(tmp_path: Path, rows_per_shard: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,n\r\nfirst,1\r\n\r\nshort\r\n5" pipe,2\n"a\n\nb",3\n'
        b"bad \xff,4\none,two,three\nlone\rend,5\nlast,6"
    )
    shards = rows_of(path, rows_per_shard, "text")
    bad = "invalid_csv"
    texts = [{"text": "first"}, bad, {"text": '5" pipe'}, {"text": "a\n\nb"}, bad, bad, bad, {"text": "last"}]
    assert [row for shard in shards for row in shard] == list(enumerate(texts))


def test_an_unclosed_quote_takes_the_rest_of_the_file() -> None:
    data = b'a,b\n"1,2\n3,4\n'
    assert [row.fields for row in records(io.BytesIO(data), "csv", 0)] == [["a", "b"], ["1,2\n3,4\n"]]


def test_tabs_separate_the_fields_of_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("id\tprompt\nr1\tone, two\n")
    assert rows_of(tmp_path / "a.tsv", 5, "id", "prompt") == [[(0, {"id": "r1", "prompt": "one, two"})]]


def test_prompts_and_limits_are_those_of_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,key\nWhy?,k1\n,k2\nHow?,k3\n")
    config = parse_job(
        {
            "model": "m",
            "input": {"path": str(tmp_path), "columns": {"question": "prompt"}, "id_column": "key", "limit": 2},
            "output": {"path": "out", "columns": ["key"]},
        }
    )
    (shard,) = plan(config).shards
    prompts = list(read_prompts(shard, config.input, config.output.columns))
    assert [(p.uid, p.prompt, p.error and p.error.error_type) for p in prompts] == [
        ("k1", "Why?", None),
        ("k2", None, "null_prompt"),
    ]
    assert prompts[0].passthrough == {"key": "k1"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b,a\n1,2,3\n", "input.path must name CSV files whose columns differ, got 'a' twice in "),
        ("\xff,b\n1,2\n", "input.path must name CSV files with a header, got "),
        ("a,b\n", "input.path must hold at least one row, got none in "),
        ("", "input.path must hold at least one row, got none in "),
    ],
)
def test_files_without_usable_columns(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path / "a.csv", 5, "a")
    assert str(caught.value).startswith(sentence)


def test_a_file_that_got_shorter_is_permanent(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\na\nb\nc\n")
    config = parse_job({"model": "m", "input": str(path), "output": "out"})
    (shard,) = plan(config).shards
    path.write_text("text\naaa\nb\n")
    with pytest.raises(PermanentError, match="has lost lines since the job was planned"):
        list(read_rows(shard, config.input, ["text"]))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"no": "prompt"}, "input.columns must rename columns of the input, got 'no' for file "),
        ({"b": "text"}, "input.columns must leave columns with different names, got 'text' twice in "),
        ({"text": "x", "b": "x"}, "input.columns must give each column a name of its own, got 'x' twice"),
        ({"text": "prompt", "b": "text"}, None),
    ],
)
def test_renamed_columns(tmp_path: Path, columns: dict[str, str], sentence: str | None) -> None:
    """A column that was renamed is not found under its old name; names may be swapped."""
    (tmp_path / "a.csv").write_text("text,b\nt,b\n")
    if sentence is None:
        assert rows_of(tmp_path / "a.csv", 5, "prompt", "text", "b", columns=columns) == [
            [(0, {"prompt": "t", "text": "b"})]
        ]
        return
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path / "a.csv", 5, "text", columns=columns)
    assert str(caught.value).startswith(sentence)
