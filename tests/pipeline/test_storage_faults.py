"""Storage behind a proxy that makes it fail: what is asked is done all the same, once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import s3fs

from infra.chaos.proxy import FaultProxy
from pipeline import clients, faults, storage
from pipeline.commits import JobStore
from pipeline.config_io import parse_job
from pipeline.errors import PermanentError, TransientError
from pipeline.shards import plan
from tests.pipeline.makers import make_receipt, write_parquet


@pytest.fixture(scope="module")
def proxy(s3_bucket: str) -> Iterator[FaultProxy]:
    """Between the client and the S3 server. Pauses are short and silence is soon taken for a fault."""
    with (
        FaultProxy(os.environ["AWS_ENDPOINT_URL"], seed=11, delay_s=0.2) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setattr(clients, "SILENCE_S", 1.0)
        patch.setattr(clients, "_RETRIES", {"mode": "standard", "total_max_attempts": 1})
        patch.setattr(faults, "FIRST_PAUSE_S", 0.01)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def folder(proxy: FaultProxy, s3_bucket: str, tmp_path: Path) -> Iterator[str]:
    yield f"{s3_bucket}/{tmp_path.name}-faults"
    proxy.set_rates({})


@pytest.mark.parametrize("kind", ["internal_error", "unavailable", "slow_down", "reset", "lost_answer", "truncated"])
def test_operations_bear_faults(kind: str, folder: str, proxy: FaultProxy) -> None:
    before = proxy.counts[kind]
    proxy.fail(kind, times=2, path="a")  # type: ignore[arg-type]
    storage.write_bytes(f"{folder}/a", b"data")
    proxy.fail(kind, times=2, path="a")  # type: ignore[arg-type]
    assert storage.read_bytes(f"{folder}/a") == b"data"
    proxy.fail(kind, times=2)  # type: ignore[arg-type]
    assert storage.list_names(folder) == ["a"]
    assert proxy.counts[kind] == before + 6


def test_silence_is_taken_for_a_fault(folder: str, proxy: FaultProxy) -> None:
    storage.write_bytes(f"{folder}/a", b"data")
    proxy.fail("hang", path="a")
    began = time.monotonic()
    assert storage.read_bytes(f"{folder}/a") == b"data"
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("is_probed", [False, True])
def test_a_commit_whose_answer_was_lost_finds_itself(folder: str, proxy: FaultProxy, is_probed: bool) -> None:
    assert not is_probed or storage.has_conditional_put(folder)
    store, receipt = JobStore(folder), make_receipt(7)
    storage.write_bytes(storage.join(folder, receipt.path), b"part")
    proxy.fail("lost_answer", method="PUT", path="_commits/")
    assert store.commit(receipt) == receipt
    assert storage.exists(storage.join(folder, receipt.path))
    assert store.committed() == {7: receipt}


def test_reading_goes_on_after_faults_in_the_middle(folder: str, proxy: FaultProxy) -> None:
    data = os.urandom(2**20)
    storage.write_bytes(f"{folder}/big", data)
    with storage.open_input(f"{folder}/big") as file:
        assert file.read(1000) == data[:1000]
        for kind in ("truncated", "reset", "internal_error"):
            proxy.fail(kind, method="GET", path="big")  # type: ignore[arg-type]
            place = file.seek(300_000, os.SEEK_CUR)
            assert file.read(1000) == data[place : place + 1000]


def test_a_mixture_by_chance(folder: str, proxy: FaultProxy) -> None:
    """Every fourth request fails in some way; objects and listings are as without it."""
    rates = {"reset": 0.1, "slow_down": 0.05, "lost_answer": 0.05, "truncated": 0.05}
    proxy.set_rates(rates)  # type: ignore[arg-type]
    paths = [f"{folder}/{i}" for i in range(12)]
    for path in paths:
        storage.write_bytes(path, path.encode())
    assert storage.read_many(paths) == {path: path.encode() for path in paths}
    assert [file.path for file in storage.find(folder)] == sorted(paths)
    for path in paths:
        storage.delete(path)
    assert storage.list_names(folder) == []


def test_an_outage_ends_in_an_error_that_passes(folder: str, proxy: FaultProxy) -> None:
    proxy.set_rates({"unavailable": 1.0})
    for action in (
        lambda: storage.read_bytes(f"{folder}/a"),
        lambda: storage.write_bytes(f"{folder}/a", b"x"),
        lambda: storage.create_if_absent(f"{folder}/a", b"x"),
        lambda: storage.list_names(folder),
        lambda: storage.open_input(f"{folder}/a"),
    ):
        _raises_soon(action)


def _raises_soon(action: Callable[[], object]) -> None:
    with faults.patience(0.05), pytest.raises(TransientError, match=r"^storage fault at s3://"):
        action()


def test_what_the_store_refuses_is_not_repeated(folder: str, proxy: FaultProxy) -> None:
    storage.write_bytes(f"{folder}/a", b"data")
    before = proxy.requests
    with pytest.raises(PermanentError, match=r"^the store refuses what is asked of s3://"):
        storage.read_range(f"{folder}/a", 100, 200)
    assert proxy.requests == before + 1


def test_limits_of_the_client_are_the_users_where_he_sets_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE", "AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    fs, _ = clients.resolve("s3://bucket/x")
    assert fs.config_kwargs["retries"] == clients._RETRIES
    assert (fs.config_kwargs["connect_timeout"], fs.retries) == (clients.CONNECT_S, 1)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    fs, _ = clients.resolve("s3://bucket/x")
    assert (fs.config_kwargs["read_timeout"], fs.config_kwargs["connect_timeout"]) == (7, clients.CONNECT_S)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    assert "retries" not in clients.resolve("s3://bucket/x")[0].config_kwargs
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    (tmp_path / "config").write_text("[default]\nretry_mode = adaptive\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert "retries" not in clients.resolve("s3://bucket/x")[0].config_kwargs


def test_planning_asks_once_for_each_footer(folder: str, proxy: FaultProxy, tmp_path: Path) -> None:
    """Sizes and etags come with the listing, whatever the number of files."""
    path = write_parquet(tmp_path / "a.parquet", {"text": ["x"] * 5})
    counts = []
    for number in (3, 23):
        for i in range(number):
            storage.write_bytes(f"{folder}/in/{i:02d}.parquet", Path(path).read_bytes())
        config = parse_job({"model": "m", "input": f"{folder}/in", "output": "out"})
        before = proxy.requests
        assert plan(config).num_rows == 5 * number
        counts.append(proxy.requests - before)
    assert counts[1] - counts[0] == 20
