"""A file that is read from a store piece by piece, and goes on where it was when the store fails."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from pipeline.clients import resolve
from pipeline.errors import PermanentError
from pipeline.faults import persistently

_BLOCK_BYTES = 8 * 2**20
"""What a client fetches at once, and reads ahead."""


class ReopeningFile(io.RawIOBase):
    """A file to read. After a fault it is opened again, at the same place, until patience has run out.

    So what it raises is TransientError, also where a Parquet reader does the reading, and PermanentError when another
    object has taken the place of the one that was opened first. Buffer it for lines.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = 0
        self._file: Any = None
        self._mark: tuple[int, Any] | None = None
        self._size = persistently(path, self._open)

    def readinto(self, buffer: Any) -> int:
        data = persistently(self._path, lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(start + offset, 0)
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, num_bytes: int) -> bytes:
        try:
            if self._file is None:
                self._open()
            self._file.seek(self._position)
            data: bytes = self._file.read(num_bytes)
            if not data and num_bytes and self._position < self._size:
                raise ConnectionError(f"nothing came of the bytes from {self._position} on")
        except BaseException:
            self._drop()
            raise
        return data

    def _open(self) -> int:
        """The size of what was opened."""
        fs, name = resolve(self._path)
        self._file = fs.open(name, "rb", block_size=_BLOCK_BYTES)
        details = getattr(self._file, "details", None) or {}
        mark = (int(self._file.seek(0, io.SEEK_END)), details.get("ETag") or details.get("etag"))
        if self._mark is not None and mark != self._mark:
            raise PermanentError(f"{self._path} has changed while it was read")
        self._mark = mark
        return mark[0]

    def _drop(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(Exception):  # of a connection that is broken already
            if file is not None:
                file.close()
