"""Objects on a local disk, whole or not at all: written under a hidden name first, then put in their place at once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterator

_HIDDEN_COPY = re.compile(r"\..+\.[0-9a-f]{32}")


def write(name: str, data: bytes) -> None:
    with _hidden_copy(name, data) as copy:
        try:
            os.replace(copy, name)
        except FileNotFoundError as error:  # cleared away (see `remove_leftovers`): the object can be written again
            raise OSError(errno.ESTALE, f"{copy} has gone") from error


def create(name: str, data: bytes) -> bool:
    """False, and nothing changed, when there is an object of that name."""
    with _hidden_copy(name, data) as copy:
        try:
            os.link(copy, name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            return _create_exclusively(name, data)
    return True


def remove_leftovers(folder: str) -> None:
    """Remove the hidden copies that processes left behind which were killed while they wrote."""
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if _HIDDEN_COPY.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):
                os.remove(entry.path)


@contextlib.contextmanager
def _hidden_copy(name: str, data: bytes) -> Iterator[str]:
    """`data`, safe on disk under a hidden name beside `name`; removed at the end where it still is."""
    folder, base = os.path.split(name)
    os.makedirs(folder, exist_ok=True)
    copy = os.path.join(folder, f".{base}.{uuid.uuid4().hex}")
    try:
        with open(copy, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield copy
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(copy)


def _create_exclusively(name: str, data: bytes) -> bool:
    """For disks without hard links: as atomic, though a crash in between leaves an object cut short."""
    try:
        with open(name, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True
