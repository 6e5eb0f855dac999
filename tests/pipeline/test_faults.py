from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import s3fs

from pipeline import faults, storage
from pipeline.errors import ConfigError, PermanentError, TransientError


@pytest.fixture
def _fresh_clients(s3_bucket: str) -> Iterator[None]:
    """Clients read the environment when they are made."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("raised", "meaning"),
    [
        (FileNotFoundError("x"), FileNotFoundError),
        (PermissionError("x"), PermanentError),
        (ConnectionResetError("x"), TransientError),
        (OSError(errno.ENOSPC, "No space left on device"), TransientError),
        (TimeoutError("x"), TransientError),
        (ZeroDivisionError("x"), ZeroDivisionError),
    ],
)
def test_what_faults_mean(raised: Exception, meaning: type[Exception]) -> None:
    with pytest.raises(meaning), faults.translated("s3://bucket/x"):
        raise raised


@pytest.mark.usefixtures("_fresh_clients")
def test_an_unreachable_store_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with faults.patience(0.0), pytest.raises(TransientError, match="storage fault at s3://bucket/x"):
        storage.read_bytes("s3://bucket/x")


@pytest.mark.usefixtures("_fresh_clients")
def test_missing_credentials_are_permanent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PermanentError, match=r"^no access to s3://bucket/x: Unable to locate credentials$"):
        storage.write_bytes("s3://bucket/x", b"data")
    with pytest.raises(ConfigError, match=r"^output.path must be writable, got 's3://bucket/o': Unable to locate cred"):
        storage.check_writable("s3://bucket/o")


class Refusal(OSError):
    """As s3fs raises them: what the store answered is the cause's."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.__cause__ = Exception(code)
        self.__cause__.response = {  # type: ignore[attr-defined]
            "ResponseMetadata": {"HTTPStatusCode": status},
            "Error": {"Code": code},
        }


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (400, "InvalidArgument", PermanentError),
        (400, "RequestTimeout", TransientError),
        (400, "ThrottlingException", TransientError),
        (409, "ConditionalRequestConflict", TransientError),
        (429, "TooManyRequests", TransientError),
        (500, "InternalError", TransientError),
        (503, "SlowDown", TransientError),
    ],
)
def test_what_answers_of_a_store_mean(status: int, code: str, meaning: type[Exception]) -> None:
    with pytest.raises(meaning, match=code), faults.translated("s3://bucket/x"):
        raise Refusal(status, code)


def test_faults_are_borne_while_patience_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, slept = 0, []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def fail(times: int) -> str:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise TransientError("lost")
        return "done"

    assert faults.retrying(lambda: fail(5)) == "done"
    assert len(slept) == 5
    assert all(pause <= faults.longest_pause_s(attempt) for attempt, pause in enumerate(slept))
    for seconds in (None, 7.0):
        calls, now, slept[:] = 0, 0.0, []
        with nullcontext() if seconds is None else faults.patience(seconds), pytest.raises(TransientError):
            faults.retrying(lambda: fail(10**6))
        limit = seconds or faults.PATIENCE_S
        assert limit - faults.LONGEST_PAUSE_S < now <= limit, "the next pause would have been too long"
    assert [faults.longest_pause_s(attempt) for attempt in (0, 1, 2, 5, 10**6)] == [0.5, 1.0, 2.0, 15.0, 15.0]


def test_other_errors_are_not_repeated() -> None:
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        faults.persistently("x", fail)
    assert calls == 1
