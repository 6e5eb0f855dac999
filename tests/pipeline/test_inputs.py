from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, PermanentError
from pipeline.inputs import _labels, _suffix, find_inputs, open_dataset
from tests.pipeline.makers import write_jsonl, write_parquet


def found(*paths: str, **options: str) -> list[tuple[str, str]]:
    """(label, format) of the files found."""
    files = find_inputs(InputConfig.model_validate({"path": paths, **options}))
    return [(file.label, file.format) for file in files]


def message_of(*paths: str, **options: str) -> str:
    with pytest.raises(ConfigError) as raised:
        found(*paths, **options)
    return str(raised.value)


def test_a_folder_counts_its_data_files_at_every_depth(tmp_path: Path) -> None:
    for name in ("b.parquet", "x/a.parquet", "_tmp/c.parquet", ".d.parquet"):
        write_parquet(tmp_path / name, {"text": ["a"]})
    (tmp_path / "README.md").write_text("not data")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    assert found(str(tmp_path)) == [("b.parquet", "parquet"), ("c.jsonl", "jsonl"), ("x/a.parquet", "parquet")]


def test_order_is_the_given_one_and_each_file_counts_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_parquet(tmp_path / f"{name}.parquet", {"text": [name]})
    labels = found(str(tmp_path / "c.parquet"), str(tmp_path / "*.parquet"))
    assert [label for label, _ in labels] == ["c.parquet", "a.parquet", "b.parquet"]


def test_labels_and_markers_stay_when_the_dataset_moves(tmp_path: Path) -> None:
    for base in ("one", "elsewhere/two"):
        for name in ("x/a.parquet", "y/b.parquet"):
            write_parquet(tmp_path / base / name, {"text": [name]})
    here, there = (find_inputs(InputConfig(path=(str(tmp_path / base),))) for base in ("one", "elsewhere/two"))
    assert [file.label for file in here] == ["x/a.parquet", "y/b.parquet"]
    assert [(f.label, f.size, f.etag) for f in here] == [(f.label, f.size, f.etag) for f in there]


def test_openai_batch_files_are_told_by_their_first_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "batch.jsonl", [{"custom_id": "a", "body": {"messages": []}}])
    assert found(path) == [("batch.jsonl", "openai_batch")]
    assert found(path, format="jsonl") == [("batch.jsonl", "jsonl")]


def test_paths_that_name_nothing(tmp_path: Path) -> None:
    hint = "(for a datasets name set input.format to datasets)"
    for path in ("none.parquet", "none*.parquet"):
        path = str(tmp_path / path)
        assert message_of(path) == f"input.path must name existing .parquet, .jsonl or .csv files, got {path!r} {hint}"
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / "empty")
    assert message_of(path) == f"input.path must name existing .parquet, .jsonl or .csv files, got {path!r} {hint}"


def test_files_of_unknown_formats(tmp_path: Path) -> None:
    path = str(tmp_path / "a.txt")
    Path(path).write_text("a,b\n")
    rule = "input.path must name .parquet, .pq, .jsonl, .ndjson, .csv, .tsv files unless input.format tells the format"
    assert message_of(path) == f"{rule}, got {path!r}"
    assert found(path, format="jsonl") == [("a.txt", "jsonl")]


def test_labels_hold_no_credentials() -> None:
    path = "https://user:password@host/d/a.parquet?X-Amz-Signature=secret"
    assert _labels([path]) == {path: "a.parquet"}
    assert _suffix(path) == ".parquet"
    with pytest.raises(ConfigError) as raised:
        _labels([path, path + "2"])
    assert str(raised.value) == "input.path must not name addresses that differ in their query or credentials alone"


def test_finished_outputs_are_read_by_their_manifest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("data/part-0.parquet", "data/part-1.parquet", "data/orphan.parquet"):
        write_parquet(out / name, {"prompt": [name]})
    (out / "_job.json").write_text("{}")
    parts = [{"path": "data/part-1.parquet"}, {"path": "data/part-0.parquet"}]
    (out / "_manifest.json").write_text(json.dumps({"parts": parts}))
    assert message_of(str(out)) == f"input.path must not be the output of an unfinished job, got {str(out)!r}"
    (out / "_SUCCESS").touch()
    assert [label for label, _ in found(str(out))] == ["part-1.parquet", "part-0.parquet"]
    for name in ("data/../../secret.parquet", "/etc/passwd", "s3://bucket/part-0.parquet", "../data/part-0.parquet"):
        (out / "_manifest.json").write_text(json.dumps({"parts": [{"path": name}]}))
        with pytest.raises(PermanentError) as raised:
            found(str(out))
        assert str(raised.value) == f"a part must be called data/NAME.parquet, got {name!r}"


def test_datasets_saved_to_disk(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert found(str(tmp_path / "one")) == [("one", "datasets")]
    both = InputConfig(path=(str(tmp_path / "both"),), split="test")
    assert open_dataset(str(tmp_path / "both"), both)["text"] == ["b"]
    assert find_inputs(both)[0].etag == find_inputs(both)[0].etag
    assert message_of(str(tmp_path / "both"), split="dev") == "input.split must be one of train, test, got 'dev'"


def test_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder goes the way of a hub name through the library."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("text,n\nhello,1\nworld,2\n")
    config = InputConfig(path=(str(tmp_path / "csv"),), format="datasets")
    assert find_inputs(config)[0].format == "datasets"
    assert open_dataset(config.path[0], config)["text"][:] == ["hello", "world"]


def test_datasets_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    path = str(tmp_path / "nothing")
    message = message_of(path, format="datasets")
    rule = "input.path must be a datasets name or saved-to-disk folder that can be loaded"
    assert message.startswith(f"{rule}, got {path!r}: ")
