"""Whatever the log holds, lacks or has become, what is committed is what the commits say."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import commit_log, storage
from pipeline.commit_log import CommitLog, commit_name, encoded
from pipeline.errors import TransientError
from pipeline.records import PartReceipt
from tests.pipeline.makers import make_receipt

LOG = "_commits.jsonl.gz"


def receipt_of(index: int, generation: int = 0) -> PartReceipt:
    return make_receipt(index, f"data/part-{index:05d}-run-{generation}.parquet", generation=generation)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the objects in `_commits` that were read one by one."""
    names: list[str] = []
    read_many = storage.read_many

    def noted(paths: list[str]) -> dict[str, bytes]:
        names.extend(path.rsplit("/", 1)[-1] for path in paths)
        return read_many(paths)

    monkeypatch.setattr(storage, "read_many", noted)
    return names


def test_only_commits_that_are_newer_than_the_log_are_read(root: str, reads: list[str]) -> None:
    log, receipts = CommitLog(root), {i: receipt_of(i) for i in range(5)}
    for i in range(3):
        log.commit(receipts[i])
    log.compact()
    assert reads == [], "who made the commits need not read them"
    for i in (3, 4):
        log.commit(receipts[i])
    reads.clear()
    assert CommitLog(root).committed() == receipts
    assert reads == ["00003.json", "00004.json"]


def test_the_log_is_written_every_so_many_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    """By several threads too; later ones make up what drivers before left out of it."""
    monkeypatch.setattr(commit_log, "COMPACT_EVERY", 10)
    log, receipts = CommitLog(str(tmp_path)), {i: receipt_of(i) for i in range(95)}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(log.commit, list(receipts.values())[:45])) == list(receipts.values())[:45]
    assert (tmp_path / LOG).exists()
    later = CommitLog(str(tmp_path))
    for i in range(45, 95):
        later.commit(receipts[i])
    reads.clear()
    assert CommitLog(str(tmp_path)).committed() == receipts
    assert len(reads) < 20
    later.compact()
    reads.clear()
    assert CommitLog(str(tmp_path)).committed() == receipts
    assert reads == []


def test_the_highest_generation_stands(root: str, reads: list[str]) -> None:
    log = CommitLog(root)
    for index, generation in ((0, 0), (1, 0), (0, 2), (0, 10), (1, 1)):
        log.commit(receipt_of(index, generation))
    standing = {0: receipt_of(0, 10), 1: receipt_of(1, 1)}
    assert CommitLog(root).committed() == standing
    assert reads == ["00000.10.json", "00001.1.json"], "those that do not stand are not read"
    log.compact()
    reads.clear()
    assert CommitLog(root).committed() == standing
    assert reads == []
    late = make_receipt(0, "data/part-00000-late-1.parquet", generation=10)
    assert log.commit(late) == standing[0]


def test_the_log_invents_nothing(tmp_path: Path) -> None:
    log = CommitLog(str(tmp_path))
    for i in range(3):
        log.commit(receipt_of(i))
    log.compact()
    (tmp_path / "_commits" / "00001.json").unlink()
    changed = make_receipt(2, "data/part-00002-another-run-1.parquet")
    (tmp_path / "_commits" / "00002.json").write_bytes(encoded(changed))
    assert CommitLog(str(tmp_path)).committed() == {0: receipt_of(0), 2: changed}


def test_a_damaged_log_is_as_good_as_none(tmp_path: Path) -> None:
    log, receipts = CommitLog(str(tmp_path)), {i: receipt_of(i) for i in range(3)}
    for receipt in receipts.values():
        log.commit(receipt)
    log.compact()
    data = (tmp_path / LOG).read_bytes()
    wrong = [data[:size] for size in range(0, len(data), 7)] + [b"not gzip", data + b"more"]
    wrong += [data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :] for i in range(10, len(data), 5)]
    for damaged in wrong:
        (tmp_path / LOG).write_bytes(damaged)
        assert CommitLog(str(tmp_path)).committed() == receipts
    (tmp_path / LOG).write_bytes(b"")
    log = CommitLog(str(tmp_path))
    log.compact()
    assert (tmp_path / LOG).read_bytes() == data, "it is made up again"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, data: bytes) -> None:
        raise TransientError("the store is away")

    log = CommitLog(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", fail)
        patch.setattr(commit_log, "COMPACT_EVERY", 1)
        assert log.commit(receipt_of(0)) == receipt_of(0)
    log.compact()
    assert (tmp_path / LOG).exists()


class _Crash(BaseException):
    """The end of the process."""


class _Dying:
    """A store whose user dies in its nth operation that changes something, before or after it is done."""

    def __init__(self, patch: pytest.MonkeyPatch, dies_at: int, is_done: bool) -> None:
        self.left, self.is_done = dies_at, is_done
        for name in ("write_bytes", "create_if_absent", "delete"):
            patch.setattr(storage, name, self.dying(getattr(storage, name)))

    def dying(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.is_done:
                raise _Crash
            result = operation(*arguments)
            if self.left == 0:
                raise _Crash
            return result

        return perform


@settings(max_examples=60, deadline=None)
@given(
    commits=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12),
    deaths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=4),
    every=st.integers(1, 4),
)
def test_no_death_loses_or_invents_a_commit(
    commits: list[tuple[int, int]], deaths: list[tuple[int, bool]], every: int
) -> None:
    """Drivers die one after the other; each goes on from what it finds. Of every shard the highest generation that any
    of them committed stands at the end, and at no time less than what was known to be committed.
    """
    root, known, left = f"memory://{uuid.uuid4().hex}", {}, list(commits)
    for dies_at, is_done in [*deaths, (10**9, False)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit_log, "COMPACT_EVERY", every)
            _Dying(patch, dies_at, is_done)
            log = CommitLog(root)
            try:
                while left:
                    receipt = receipt_of(*left[0])
                    assert log.commit(receipt) == receipt
                    known[left.pop(0)] = receipt
                log.compact()
            except _Crash:
                pass
        found = CommitLog(root).committed()
        _check(found, known, commits)
    assert not left
    assert {(i, r.generation) for i, r in found.items()} == {
        (i, max(g for j, g in commits if j == i)) for i, _ in commits
    }


def _check(found: dict[int, PartReceipt], known: dict[Any, PartReceipt], commits: list[tuple[int, int]]) -> None:
    for index, generation in known:
        assert found[index].generation >= generation
    for index, receipt in found.items():
        assert (index, receipt.generation) in commits
        assert receipt == receipt_of(index, receipt.generation)


def test_names_of_commits() -> None:
    assert [commit_name(42, 0), commit_name(42, 3), commit_name(1234567, 0)] == [
        "00042.json",
        "00042.3.json",
        "1234567.json",
    ]


def test_racing_threads_commit_a_shard_once(root: str) -> None:
    log, start = CommitLog(root), threading.Barrier(4)

    def race(i: int) -> PartReceipt:
        start.wait()
        return log.commit(make_receipt(0, f"data/part-00000-run{i}-1.parquet"))

    with ThreadPoolExecutor(4) as pool:
        standing = {receipt.path for receipt in pool.map(race, range(4))}
    assert len(standing) == 1
    assert {receipt.path for receipt in CommitLog(root).committed().values()} == standing
