"""`sevenleague list`: the jobs below a folder or URL, from storage alone."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config_io import parse_job
from pipeline.preparation import prepare
from tests.pipeline.makers import make_receipt, write_parquet


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Two jobs, one of them deeper down and half done, and a broken one."""
    folder = str(tmp_path / "root") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    prompts = write_parquet(tmp_path / "in.parquet", {"prompt": ["a", "b", "c", "d"]})
    for name, shards, state in (("b/half", [0], "running"), ("done", [0, 1], "done")):
        output = storage.join(folder, name)
        job = {"model": "tiny", "input": prompts, "output": {"path": output, "rows_per_shard": 2}}
        prepared = prepare(parse_job(job))
        store = JobStore(output)
        store.create_or_resume(prepared.config, prepared.plan, "revision")
        for index in shards:
            storage.write_bytes(storage.join(output, make_receipt(index).path), b"part")
            store.commit(make_receipt(index))
        if state == "done":
            store.finish(prepared.config, store.committed().values(), {})
        else:
            store.set_state("running", "run")
    storage.write_bytes(storage.join(folder, "a", "_job.json"), b"{cut short")
    storage.write_bytes(storage.join(folder, "notes.txt"), b"")
    return folder


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["list", *arguments])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_one_line_for_each_job(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken, half, done = json.loads(listed(capsys, root, "--json"))
    assert broken["output"] == storage.join(root, "a")
    assert broken["error"].startswith("JSONDecodeError: ")
    assert (half["output"], half["state"]) == (storage.join(root, "b/half"), "running")
    assert half["shards"] == {"total": 2, "committed": 1}
    assert half["rows"] == {"total": 4, "ok": 1, "failed": 1}
    assert half["completion_tokens"] == 5
    assert 0 <= half["heartbeat_age_s"] < 60
    assert (done["state"], done["heartbeat_age_s"]) == ("done", None)

    title, *lines = listed(capsys, root).splitlines()
    assert title.split() == ["output", "state", "shards", "rows", "failed", "tokens", "heartbeat"]
    assert [line.split()[1:6] for line in lines] == [
        ["unreadable"],
        ["running", "1/2", "2/4", "1", "5"],
        ["done", "2/2", "4/4", "2", "10"],
    ]
    assert json.loads(listed(capsys, storage.join(root, "done"), "--json")) == [done], "a job is its own root"


def test_each_folder_is_listed_once_and_no_output_is_entered(
    root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    plain = storage.list_folder

    def counted(folder: str) -> Any:
        seen.append(folder)
        return plain(folder)

    monkeypatch.setattr(storage, "list_folder", counted)
    listed(capsys, root, "--json")
    found = [folder for folder in seen if "/_commits" not in folder]  # what tells the state of a job
    assert found == [root, *(storage.join(root, name) for name in ("a", "b", "b/half", "done"))]


def test_a_root_without_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["list", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"sevenleague: the root must be or hold outputs of jobs, got {str(tmp_path / 'none')!r}\n"
    )
