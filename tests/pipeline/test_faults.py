from __future__ import annotations

import errno
from collections.abc import Iterator

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
    with pytest.raises(TransientError, match="storage fault at s3://bucket/x"):
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


def test_retrying_gives_up_after_its_attempts() -> None:
    calls = 0

    def fail_twice() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise TransientError("lost")
        return "done"

    assert faults.retrying(fail_twice, first_pause_s=0.0) == "done"
    calls = 0
    with pytest.raises(TransientError):
        faults.retrying(fail_twice, attempts=2, first_pause_s=0.0)
