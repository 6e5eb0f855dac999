"""The parts of `make chaos` that decide what happens and whether it went well. The whole runs by `make chaos` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.chaos import processes
from infra.chaos.attempts import Attempt, attempts_of, lost_attempts
from infra.chaos.compare import compare, inconsistencies, read_rows
from infra.chaos.schedule import BY_CLUSTER, KINDS, POISONS, STORAGE, schedule
from pipeline.commits import JobStore
from pipeline.records import AcceptanceStats, PartReceipt


def row(uid: str, sample_index: int = 0, **values: Any) -> dict[str, Any]:
    fixed = {"id": uid, "sample_index": sample_index, "generation": f"text of {uid}", "completion_token_ids": [1, 2]}
    return {**fixed, "finish_reason": "stop", "error_type": None, "latency_s": 0.5, "num_steps": 3, **values}


ROWS = [row("a"), row("b", 0), row("b", 1), row("c-kills")]


def test_how_rows_were_decoded_may_differ_and_their_order() -> None:
    found = [{**each, "latency_s": 9.0, "num_steps": 1} for each in reversed(ROWS)]
    assert compare(ROWS, found, {}).is_good


@pytest.mark.parametrize(
    ("found", "lost", "duplicated", "problem"),
    [
        (ROWS[1:], 1, 0, "1 rows lost: ('a', 0)"),
        ([*ROWS, ROWS[1]], 0, 1, "1 rows twice: ('b', 0)"),
        ([*ROWS, row("d")], 0, 0, "1 rows never asked for: ('d', 0)"),
        ([row("a", completion_token_ids=[1, 3]), *ROWS[1:]], 0, 0, "completion_token_ids [1, 2] became [1, 3]"),
        ([row("a", generation=None, finish_reason="error"), *ROWS[1:]], 0, 0, "finish_reason 'stop' became 'error'"),
    ],
)
def test_what_may_not_differ(found: list[dict[str, Any]], lost: int, duplicated: int, problem: str) -> None:
    comparison = compare(ROWS, found, {})
    assert (comparison.lost, comparison.duplicated) == (lost, duplicated)
    assert problem in " ".join(comparison.problems)
    assert not comparison.is_good


def test_a_poisoned_row_must_be_an_error_of_its_type() -> None:
    poisoned = {"c-kills": "worker_crash"}
    failed = row("c-kills", generation=None, finish_reason="error", error_type="worker_crash")
    assert compare(ROWS, [*ROWS[:3], failed], poisoned).is_good
    assert not compare(ROWS, ROWS, poisoned).is_good
    assert not compare(ROWS, [*ROWS[:3], {**failed, "error_type": "engine_error"}], poisoned).is_good


def receipt(shard: int, path: str, rows: int) -> PartReceipt:
    return PartReceipt(shard, 1, path, rows, 0, 1, 1, 0, AcceptanceStats(), {}, 0.1, "worker-0")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished output of two shards."""
    store = JobStore(str(tmp_path))
    (tmp_path / "data").mkdir()
    receipts = [receipt(0, "data/part-0.parquet", 1), receipt(1, "data/part-1.parquet", 2)]
    for each, rows in zip(receipts, (ROWS[:1], ROWS[1:3]), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / each.path)
        store.commit(each)
    manifest = [{"path": each.path, "rows": each.num_rows} for each in receipts]
    (tmp_path / "_manifest.json").write_text(json.dumps({"rows": 3, "parts": manifest}))
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def test_a_whole_output_is_consistent(output: Path) -> None:
    assert inconsistencies(str(output), 2) == []
    assert len(read_rows(str(output))) == 3
    assert inconsistencies(str(output), 3) == ["2 of 3 shards are committed"]


def test_orphans_missing_parts_and_wrong_counts_show(output: Path) -> None:
    (output / "data" / "part-0-other.parquet").write_bytes((output / "data" / "part-0.parquet").read_bytes())
    assert "the store has ['data/part-0-other.parquet']" in inconsistencies(str(output), 2)[0]
    (output / "data" / "part-0-other.parquet").unlink()
    pq.write_table(pa.Table.from_pylist(ROWS[1:2]), output / "data" / "part-1.parquet")
    assert inconsistencies(str(output), 2) == ["data/part-1.parquet has 1 rows, its receipt says 2"]
    (output / "data" / "part-1.parquet").unlink()
    assert "the manifest names ['data/part-1.parquet']" in inconsistencies(str(output), 2)[0]
    (output / "_SUCCESS").unlink()
    assert inconsistencies(str(output), 2) == ["there is no _SUCCESS"]


def test_the_schedule_follows_the_seed_and_uses_all_kinds() -> None:
    planned = schedule(10, 6, seed=3)
    assert planned == schedule(10, 6, seed=3) != schedule(10, 6, seed=4)
    kinds = Counter(kind for each in planned for kind in (*each.poisons, *(fault.kind for fault in each.faults)))
    assert kinds.total() == 60
    assert set(kinds) == set(KINDS)
    for each in planned:
        places = [fault.after_commits for fault in each.faults]
        assert places == sorted(places)
        assert 0 < places[0] <= places[-1] < each.shards * 0.8
        struck = {fault.kind for fault in each.faults}
        assert each.store == "s3" or not struck & set(STORAGE)
        assert not struck & set(BY_CLUSTER["own" if each.cluster == "nodes" else "nodes"])
        assert not struck & set(POISONS)


def test_only_processes_with_the_mark_are_found_and_killed() -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    started = [
        subprocess.Popen(sleep, stdout=subprocess.PIPE, env={**os.environ, processes.MARK: mark})
        for mark in ("test-chaos-1.", "test-chaos-10.")
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        found = processes.marked("test-chaos-1.")
        assert [process.pid for process in found] == [started[0].pid]
        processes.kill(found)
        assert processes.marked("test-chaos-1.") == []
        assert started[1].poll() is None
        assert processes.workers("test-chaos-10.") == []
    finally:
        for process in started:
            process.kill()
            process.communicate()


def event(name: str, at: float, pid: int, shard: int, run: str = "r") -> dict[str, Any]:
    return {"event": name, "at": at, "pid": pid, "shard": shard, "run": run, "row": f"row-{shard}"}


def test_attempts_are_read_from_events() -> None:
    events = [event("began", 1, 7, 0), event("began", 2, 7, 1), event("decoded", 3, 7, 0), event("written", 4, 7, 0)]
    first, second = attempts_of(events, {"row-0": 0, "row-1": 1})
    assert first == Attempt(0, "r", 7, 1, ended=4, is_decoded=True)
    assert second == Attempt(1, "r", 7, 2, ended=None, is_decoded=False)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([Attempt(0, "r", 1, 1.0, 5.0, True)], []),
        # its process died in the midst of it; or before its first token
        ([Attempt(0, "r", 1, 1.0, None, True), Attempt(0, "r", 2, 3.0, 5.0, True)], [(0, 3.0, True)]),
        ([Attempt(0, "r", 1, 1.0, None, False), Attempt(0, "r", 2, 3.0, 5.0, True)], [(0, 3.0, False)]),
        # a duplicate of one that lived on; the same of another run of the driver is none
        ([Attempt(0, "r", 1, 1.0, 6.0, True), Attempt(0, "r", 2, 3.0, 5.0, True)], []),
        ([Attempt(0, "r", 1, 1.0, 6.0, True), Attempt(0, "s", 2, 3.0, 5.0, True)], [(0, 3.0, True)]),
    ],
)
def test_which_attempts_are_lost(attempts: list[Attempt], expected: list[tuple[int, float, bool]]) -> None:
    assert [(lost.shard, lost.again_at, lost.is_redone) for lost in lost_attempts(attempts)] == expected
