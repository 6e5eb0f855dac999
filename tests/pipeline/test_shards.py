from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import ConfigError
from pipeline.plan_storage import read_plan, write_plan
from pipeline.shards import plan
from tests.pipeline.makers import write_jsonl, write_parquet


def job(*paths: str, columns: tuple[str, ...] = (), rows_per_shard: int = 256, **options: Any) -> JobConfig:
    output = {"path": "out", "columns": columns, "rows_per_shard": rows_per_shard}
    return parse_job({"model": "m", "input": {"path": paths, **options}, "output": output})


def refusal(*paths: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        plan(job(*paths, **options))
    return str(raised.value)


def test_shards_name_the_row_groups_they_overlap(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": list("abcdefgh")}, rows_per_group=3)
    shards = plan(job(path, rows_per_shard=4)).shards
    where = [(s.start_row, s.num_rows, s.row_groups, s.first_row_of_groups) for s in shards]
    assert where == [(0, 4, (0, 1), 0), (4, 4, (1, 2), 3)]


def test_a_shard_never_crosses_files_and_the_limit_is_kept(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5})
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}] * 5)
    whole = plan(job(a, b, rows_per_shard=3))
    assert [(s.index, s.label, s.num_rows) for s in whole.shards] == [
        (0, "a.parquet", 3),
        (1, "a.parquet", 2),
        (2, "b.jsonl", 3),
        (3, "b.jsonl", 2),
    ]
    limited = plan(job(a, b, rows_per_shard=3, limit=7))
    assert limited.num_rows == 7
    assert [s.num_rows for s in limited.shards] == [3, 2, 2]
    assert len(plan(job(a, b, limit=5)).shards) == 1


def test_the_plan_reads_footers_only(tmp_path: Path) -> None:
    """With every page overwritten the plan is the same."""
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x" * 1000] * 50})
    before = plan(job(path)).shards
    data = bytearray(Path(path).read_bytes())
    data[4:60] = b"\xff" * 56
    Path(path).write_bytes(data)
    assert plan(job(path)).shards == before


def test_plans_are_written_once_and_read_back(tmp_path: Path) -> None:
    a = write_parquet(
        tmp_path / "a.parquet", {"text": ["x"] * 5, "n": pa.array(range(5), pa.int16())}, rows_per_group=2
    )
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "n": 1}] * 5)
    made = plan(job(a, b, columns=("n",), rows_per_shard=3))
    stored = str(tmp_path / "_plan.parquet")
    assert write_plan(stored, made)
    assert not write_plan(stored, plan(job(a)))
    assert read_plan(stored) == made


def test_passthrough_types_are_the_inputs(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("day", pa.date32()), ("price", pa.decimal128(9, 2))]))
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "odd": pa.array([[]], kind)})
    assert plan(job(path, columns=("odd",))).passthrough == pa.schema([("odd", kind)])
    rows = [{"text": "x", "n": None, "m": 1, "o": None}, {"text": "x", "n": "s", "m": 1.5, "o": None}]
    lines = write_jsonl(tmp_path / "b.jsonl", rows)
    found = plan(job(lines, columns=("n", "m", "o"))).passthrough
    assert found == pa.schema([("n", pa.string()), ("m", pa.float64()), ("o", pa.string())])


def test_passthrough_types_that_do_not_fit(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": ["x"], "n": [1]})
    b = write_parquet(tmp_path / "b.parquet", {"text": ["x"], "n": ["s"]})
    rule = "output.columns must hold values of one type"
    assert refusal(a, b, columns=("n",)) == f"{rule}, got int64 and string for column 'n' in file {b!r}"
    c = write_jsonl(tmp_path / "c.jsonl", [{"text": "x", "n": 1}, {"text": "x", "n": "s"}])
    assert refusal(c, columns=("n",)) == f"{rule}, got several for column 'n' in file {c!r}"
    assert (
        refusal(a, columns=("text", "seed")) == "output.columns must not name columns that every output has, got 'seed'"
    )


def test_empty_inputs(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    b = write_jsonl(tmp_path / "b.jsonl", ["", "  "])
    assert refusal(a, b) == f"input.path must hold at least one row, got none in {a}, {b}"


def test_corrupt_parquet_files_stop_the_job_before_it_starts(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    Path(path).write_bytes(Path(path).read_bytes()[:-5])
    assert refusal(path).startswith(
        f"input.path must name readable Parquet files, got {path!r}: Parquet magic bytes not"
    )
    Path(path).write_bytes(b"")
    assert refusal(path).startswith(f"input.path must name readable Parquet files, got {path!r}: ")


def test_columns_that_are_missing(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"question": ["x"], "n": [1]})
    near = f"got 'questoin' for file {a!r} (did you mean 'question'?)"
    assert refusal(a, prompt_column="questoin") == f"input.prompt_column must name columns of the input, {near}"
    assert (
        refusal(a, prompt_template="{{ questoin }}") == f"input.prompt_template must name columns of the input, {near}"
    )
    far = f"got 'zzz' for file {a!r} (its columns: question, n)"
    assert (
        refusal(a, prompt_column="question", id_column="zzz")
        == f"input.id_column must name columns of the input, {far}"
    )
    assert (
        refusal(a, prompt_column="question", columns=("zzz",))
        == f"output.columns must name columns of the input, {far}"
    )
    names = f"unless a column is called messages, prompt or text, got columns question, n in file {a!r}"
    assert refusal(a) == f"input.prompt_column must be given {names}"


def test_columns_of_the_wrong_type(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": [1], "key": [1.5], "list": [["a"]]})
    rule = "input.prompt_column must be a string or a messages list"
    assert refusal(a) == f"{rule}, got int64 for column 'text' in file {a!r}"
    assert refusal(a, prompt_column="list") == f"{rule}, got list<element: string> for column 'list' in file {a!r}"
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": 5}, {"prompt": 6}])
    assert refusal(b) == f"{rule}, got int64 for column 'prompt' in file {b!r}"
    c = write_parquet(tmp_path / "c.parquet", {"text": ["x"], "key": [1.5]})
    key = f"got double for column 'key' in file {c!r}"
    assert refusal(c, id_column="key") == f"input.id_column must be a string or integer column, {key}"


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_all_kinds_of_text_columns_are_prompts(tmp_path: Path, kind: pa.DataType) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(["x"]).cast(kind)})
    assert plan(job(path)).num_rows == 1


def test_prompts_have_one_source(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    assert refusal(a, prompt_column="text", prompt_template="{{ text }}") == (
        "input.prompt_template must be the only source of prompts, got input.prompt_column 'text' too"
    )
    fixed = refusal(a, prompt_template="always this")
    assert fixed == "input.prompt_template must use a column of the input, got 'always this'"


def test_duplicate_ids_name_both_places(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 4, "key": ["p", "q", "r", "s"]}, rows_per_group=2)
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "x", "key": "t"}, {"text": "x", "key": "r"}])
    assert refusal(a, b, id_column="key", rows_per_shard=3) == (
        f"input.id_column must hold unique ids, got 'r' twice: row 2 of {a} and row 1 of {b}"
    )
    assert plan(job(a, b, id_column="key", limit=5)).num_rows == 5, "rows beyond the limit do not count"


def test_openai_batches_need_unique_ids_too(tmp_path: Path) -> None:
    line = {"custom_id": "r", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    a = write_jsonl(tmp_path / "a.jsonl", [line, line])
    assert refusal(a) == f"input.id_column must hold unique ids, got 'r' twice: row 0 of {a} and row 1 of {a}"


def test_null_ids(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 2, "key": ["p", None]})
    place = f"got null for column 'key' in row 1 of {a}"
    assert refusal(a, id_column="key") == f"input.id_column must hold an id in every row, {place}"


def test_many_files_are_planned_as_one_after_the_other_would_be(tmp_path: Path) -> None:
    """Read in parallel, with what each file gives put together in order."""
    paths = []
    for i in range(150):
        columns = {"text": ["x" * (i % 7)] * (1 + i % 5), "n": list(range(1 + i % 5))}
        lines = [{"text": "x", "n": j} for j in range(1 + i % 5)]
        name = tmp_path / f"{i:03d}"
        paths.append(write_jsonl(name, lines) if i % 10 == 3 else write_parquet(name, columns, rows_per_group=2))
    for i, path in enumerate(paths):
        paths[i] = str(Path(path).rename(f"{path}.{'jsonl' if i % 10 == 3 else 'parquet'}"))
    config = job(str(tmp_path), columns=("n",), rows_per_shard=3)
    whole = plan(config)
    alone = [plan(job(path, columns=("n",), rows_per_shard=3)) for path in paths]
    shards = [shard for one in alone for shard in one.shards]
    labels = [file.label for file in whole.files]
    assert labels == sorted(Path(path).name for path in paths)
    assert whole.shards == tuple(replace(shard, index=i) for i, shard in enumerate(shards))
    assert whole.files == tuple(file for one in alone for file in one.files)
    assert whole == plan(job(str(tmp_path), columns=("n",), rows_per_shard=3, limit=10**9)), "which reads in turn"


def test_of_several_mistakes_the_first_in_file_order_counts(tmp_path: Path) -> None:
    for i in range(100):
        path = write_parquet(tmp_path / f"{i:03d}.parquet", {"text" if i != 30 else "other": ["x"]})
        if i in (41, 77):
            Path(path).write_bytes(b"no longer Parquet")
    for _ in range(5):
        assert "030.parquet" in refusal(str(tmp_path))
    write_parquet(tmp_path / "030.parquet", {"text": ["x"]})
    for _ in range(5):
        assert "041.parquet" in refusal(str(tmp_path))
    assert plan(job(str(tmp_path), limit=41)).num_rows == 41, "what lies behind the limit is not looked into"


def test_footers_longer_than_what_is_read_at_first(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"text": ["x"], **{f"column {i} {'x' * 200}": [i] for i in range(400)}})
    footer_bytes = int.from_bytes(path.read_bytes()[-8:-4], "little")
    assert footer_bytes > 64 * 1024
    assert plan(job(str(path))).num_rows == 1


def test_shards_know_about_how_large_they_are(tmp_path: Path) -> None:
    a = write_parquet(tmp_path / "a.parquet", {"text": [*["x"] * 4, *("y" * 1000 for _ in range(4))]}, rows_per_group=4)
    sizes = [shard.num_bytes for shard in plan(job(a, rows_per_shard=2)).shards]
    footer = pq.ParquetFile(a).metadata
    assert sizes == [footer.row_group(group).total_byte_size // 2 for group in (0, 0, 1, 1)]
    (across,) = plan(job(a, rows_per_shard=6, limit=6)).shards
    assert across.num_bytes == footer.row_group(0).total_byte_size + footer.row_group(1).total_byte_size // 2
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}, {"text": "y" * 100}])
    assert [shard.num_bytes for shard in plan(job(b, rows_per_shard=1)).shards] == [14, 113]


def test_plans_of_earlier_versions_load(tmp_path: Path) -> None:
    """They know no sizes."""
    made = plan(job(write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 3}), rows_per_shard=2))
    stored = tmp_path / "_plan.parquet"
    write_plan(str(stored), made)
    table = pq.read_table(stored)
    pq.write_table(table.drop_columns(["num_bytes"]), stored)
    assert read_plan(str(stored)).shards == tuple(replace(shard, num_bytes=0) for shard in made.shards)
