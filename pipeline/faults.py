"""What the faults of stores mean: one vocabulary for local disks, S3 clients and whatever else fsspec uses.

An object that is missing, or in the way, raises the OSError that says so; a lack of rights or credentials raises
PermanentError; all else (lost connection, throttling, full disk) may pass, and raises TransientError.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from pipeline.errors import PermanentError, TransientError

T = TypeVar("T")

_PLAIN = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
_NETWORK_LIBRARIES = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn what a store raises at `path` into what it means (see above)."""
    try:
        yield
    except _PLAIN:
        raise
    except Exception as error:
        if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
            raise PermanentError(f"no access to {path}: {error}") from error
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in _NETWORK_LIBRARIES:
            raise TransientError(f"storage fault at {path}: {error}") from error
        raise


class CheckedFile(io.RawIOBase):
    """A file to read whose faults are translated, also where a Parquet reader does the reading. Buffer it for lines."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def readinto(self, buffer: Any) -> int:
        with translated(self._path):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return cast(int, self._file.seek(offset, whence))

    def tell(self) -> int:
        return cast(int, self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def retrying(action: Callable[[], T], attempts: int = 4, first_pause_s: float = 0.5) -> T:
    """The result of `action`, tried again after 0.5, 1, 2.. seconds while it raises TransientError."""
    for attempt in range(attempts - 1):
        try:
            return action()
        except TransientError:
            time.sleep(first_pause_s * 2**attempt)
    return action()
