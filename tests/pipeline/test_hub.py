"""Pushing to a hub on loopback: one commit, the bytes as they are, and nothing sent twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.push import push_if_possible
from pipeline import hub, storage
from pipeline.errors import ConfigError
from pipeline.exporting.export import export
from pipeline.exporting.options import ExportOptions
from pipeline.hub import parse_target
from tests.fake_hub import FakeHub, fake_hub
from tests.pipeline.outputs import answer, make_output

TOKEN = "hf_" + "a" * 30
TARGET = parse_target("me/data", True, "main")


@pytest.fixture
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    output = make_output(tmp_path, [answer("a"), answer("b")])
    export(output, str(tmp_path / "dest"), ExportOptions("messages"))
    return tmp_path / "dest"


def held(server: FakeHub, branch: str = "main") -> dict[str, bytes]:
    files = dict(server.files["me/data", branch])
    del files[".gitattributes"]
    return files


def on_disk(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_a_data_set_is_one_commit_and_pushes_again_for_nothing(running_hub: FakeHub, data_set: Path) -> None:
    address = hub.push(str(data_set), TARGET)
    assert address.startswith(f"{running_hub.url}/datasets/me/data/commit/")
    assert held(running_hub) == on_disk(data_set, "README.md", "data/train-00000.parquet")
    assert running_hub.private == {"me/data": True}
    assert running_hub.commits == [["README.md", "data/train-00000.parquet"]]
    hub.push(str(data_set), TARGET)
    assert len(running_hub.commits) == 1, "nothing has changed"


def test_a_finished_output_takes_the_place_of_the_last(running_hub: FakeHub, tmp_path: Path, data_set: Path) -> None:
    output = tmp_path / "out"
    (output / "data" / "part-00099-late-1.parquet").write_bytes(b"no commit names it")
    hub.push(str(data_set), TARGET)
    hub.push(str(output), TARGET)
    part = next(file.name for file in (output / "data").iterdir() if "late" not in file.name)
    assert held(running_hub) == on_disk(output, "README.md", "metrics.json", "_manifest.json", f"data/{part}")
    assert len(running_hub.commits) == 2


def test_from_an_object_store_to_a_branch(running_hub: FakeHub, s3_bucket: str, tmp_path: Path) -> None:
    output = make_output(tmp_path, [answer("a")], output=f"{s3_bucket}/{tmp_path.name}")
    hub.push(output, parse_target("me/data", False, "second"))
    assert held(running_hub) == {}
    assert held(running_hub, "second")["metrics.json"] == storage.read_bytes(storage.join(output, "metrics.json"))
    assert running_hub.private == {"me/data": False}


def test_a_failure_is_told_with_the_way_out(
    running_hub: FakeHub, data_set: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running_hub.is_broken = True
    with caplog.at_level(logging.WARNING):
        assert not push_if_possible(str(data_set), TARGET)
    assert f"push it with `sevenleague push {data_set} me/data`" in caplog.text
    assert TOKEN not in caplog.text
    running_hub.is_broken = False
    assert push_if_possible(str(data_set), TARGET)


def test_the_token_goes_to_the_hub_alone(running_hub: FakeHub, data_set: Path) -> None:
    hub.push(str(data_set), TARGET)
    assert f"Bearer {TOKEN}" in running_hub.tokens
    assert all(TOKEN.encode() not in data for data in held(running_hub).values())


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HF_TOKEN must be set in the environment"):
        hub.check_token()
    with pytest.raises(ConfigError, match="the repository must be USER/NAME, got 'data'"):
        parse_target("data", True, "main")
    unfinished = make_output(tmp_path, [answer(uid) for uid in "abcd"], unfinished=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="FOLDER must be the output of a finished job"):
        hub.push(unfinished, TARGET)
    with pytest.raises(ConfigError, match="FOLDER must be a finished output or a data set"):
        hub.push(str(tmp_path), TARGET)
