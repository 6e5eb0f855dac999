"""Objects by path: local disk, `memory://`, S3 and whatever else fsspec reaches. Paths are strings, never pathlib.

Objects are written whole or not at all. What makes commits safe is `create_if_absent`:

* local disk: the bytes are written under a hidden name, then linked to the final one (atomic, fails when it exists);
* `memory://`: under a lock of this process;
* object stores: a conditional put (`If-None-Match: *` on S3, the generation check on GCS). `has_conditional_put` probes
  a store for it; without it two drivers that commit the same shard within the same instant could both believe they won.

Options come from the environment, as fsspec and the stores' own clients read them: `AWS_ENDPOINT_URL` (or
`FSSPEC_S3_ENDPOINT_URL`), `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_PROFILE`, `FSSPEC_S3='{"anon": true}'`.

What is raised when a store fails: see `faults`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.errors import ConfigError, SevenLeagueError
from pipeline.faults import CheckedFile, translated

_MEMORY_LOCK = threading.Lock()
_SAMPLE_BYTES = 64 * 1024
_SAMPLES = 16
_BUFFER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class FileInfo:
    """An object and what tells its content apart: the store's etag, or `sampled-..` where the store keeps none."""

    path: str
    size: int
    etag: str


def join(root: str, *names: str) -> str:
    """`join("s3://bucket/out/", "data", "x")` is `s3://bucket/out/data/x`."""
    return "/".join([root.rstrip("/") or root, *names]) if root != "/" else "/" + "/".join(names)


def absolute(path: str) -> str:
    """A local path made absolute; URLs stay as they are. Workers may run in another folder than the driver."""
    if "://" in path:
        return path
    return os.path.abspath(os.path.expanduser(path))


def without_credentials(path: str) -> str:
    """A path fit to be stored or shown: `user:password@` and the query of an http address are replaced."""
    path = re.sub(r"://[^/@]+@", "://***@", path)
    return re.sub(r"^(https?://[^?]*)\?.*", r"\1?***", path)


def read_bytes(path: str) -> bytes:
    fs, name = _resolve(path)
    with translated(path):
        return cast(bytes, fs.cat_file(name))


def read_many(paths: Sequence[str]) -> dict[str, bytes]:
    """The bytes of several objects of one store, fetched concurrently where the store can."""
    if not paths:
        return {}
    fs, _ = _resolve(paths[0])
    names = [fs._strip_protocol(path) for path in paths]
    with translated(paths[0]):
        found = fs.cat(names) if len(names) > 1 else {names[0]: fs.cat_file(names[0])}
    return {path: found[name] for path, name in zip(paths, names, strict=True)}


def write_bytes(path: str, data: bytes) -> None:
    """Write an object whole, replacing what was there. A reader never sees a part of it, whatever fails."""
    fs, name = _resolve(path)
    with translated(path):
        if isinstance(fs, LocalFileSystem):
            with _hidden_copy(name, data) as copy:
                os.replace(copy, name)
        else:
            fs.pipe_file(name, data)


def create_if_absent(path: str, data: bytes) -> bool:
    """Create an object whole; False, and nothing changed, when one of that name exists."""
    fs, name = _resolve(path)
    with translated(path):
        if isinstance(fs, LocalFileSystem):
            return _link_if_absent(name, data)
        if isinstance(fs, MemoryFileSystem):
            with _MEMORY_LOCK:
                return _put_if_absent(fs, name, data)
        return _put_if_absent(fs, name, data)


def has_conditional_put(folder: str) -> bool:
    """Whether `create_if_absent` is atomic in this store, found out by trying: a second conditional put must fail.

    The existence check that `create_if_absent` makes first is left out here, so that only the store can refuse.
    """
    fs, name = _resolve(join(folder, f"_probe-{uuid.uuid4().hex}"))
    if isinstance(fs, LocalFileSystem):
        return True
    with translated(folder):
        fs.pipe_file(name, b"first")
        try:
            fs.pipe_file(name, b"second", mode="create")
        except OSError as error:
            return _exists_already(error)
        else:
            return False
        finally:
            fs.rm_file(name)


def exists(path: str) -> bool:
    fs, name = _resolve(path)
    with translated(path):
        return bool(fs.exists(name))


def is_folder(path: str) -> bool:
    fs, name = _resolve(path)
    with translated(path):
        return bool(fs.isdir(name))


def list_names(folder: str) -> list[str]:
    """Sorted names of the objects right in a folder, hidden ones left out; none when there is no such folder."""
    fs, name = _resolve(folder)
    with translated(folder):
        try:
            entries = fs.ls(name, detail=True)
        except FileNotFoundError:
            return []
    names = (entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")
    return sorted(name for name in names if name and not name.startswith("."))


def find(path: str) -> list[str]:
    """Sorted paths of the files that a path names: itself, the matches of a glob, or all files below a folder.

    Below a folder, names that begin with `_` or `.` are left out, at every level.
    """
    fs, name = _resolve(path)
    with translated(path):
        if fs.isfile(name):
            return [path if "://" in path else name]
        if any(wildcard in name for wildcard in "*?["):
            names = [match for match in fs.glob(name) if fs.isfile(match)]
        elif fs.isdir(name):
            inner = len(name.rstrip("/")) + 1
            names = [file for file in fs.find(name) if not _is_hidden(file[inner:])]
        else:
            names = []
    return sorted(fs.unstrip_protocol(found) if "://" in path else found for found in names)


def delete(path: str) -> None:
    """Remove an object; nothing happens when there is none."""
    fs, name = _resolve(path)
    with translated(path), contextlib.suppress(FileNotFoundError):
        fs.rm_file(name)


def file_info(path: str) -> FileInfo:
    """Size and content marker of an object. Raises FileNotFoundError.

    Where the store keeps no etag (local disk, `memory://`), the marker hashes the size and 16 evenly spaced blocks of
    64 KiB, first and last included: the whole file up to 1 MiB, and the footer of a Parquet file always. Modification
    times are left out, so that copying a dataset changes nothing; an edit in place of a large file that keeps its size
    and meets no block goes unnoticed.
    """
    fs, name = _resolve(path)
    with translated(path):
        info = fs.info(name)
        size = int(info["size"])
        etag = info.get("ETag") or info.get("etag")
        if etag is None:
            with fs.open(name, "rb") as file:
                etag = _sampled_hash(file, size)
    return FileInfo(path, size, str(etag).strip('"'))


def open_input(path: str) -> io.BufferedReader:
    """A seekable file to read from. Its faults raise TransientError too, so a reader can tell them from bad bytes."""
    fs, name = _resolve(path)
    with translated(path):
        return io.BufferedReader(CheckedFile(fs.open(name, "rb"), path), _BUFFER_BYTES)


def check_writable(folder: str) -> None:
    """Raise ConfigError unless objects can be created, read and removed in a folder."""
    probe = join(folder, f"_probe-{uuid.uuid4().hex}")
    try:
        write_bytes(probe, b"probe")
        read_bytes(probe)
        delete(probe)
    except Exception as raised:  # whatever the store says, it says that the output cannot be written
        error = raised.__cause__ if isinstance(raised, SevenLeagueError) and raised.__cause__ else raised
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise ConfigError(f"output.path must be writable, got {folder!r}: {reason}") from raised


def _resolve(path: str) -> tuple[Any, str]:
    """The file system of a path and its name there. Listings are never cached: other processes write too."""
    try:
        fs, name = fsspec.core.url_to_fs(path, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"a path must be of a store that is installed here, got {path!r}: {error}") from error
    return fs, name


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


def _link_if_absent(name: str, data: bytes) -> bool:
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


def _create_exclusively(name: str, data: bytes) -> bool:
    """For disks without hard links: as atomic, though a crash in between leaves an object cut short."""
    try:
        with open(name, "xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def _put_if_absent(fs: Any, name: str, data: bytes) -> bool:
    if fs.exists(name):  # stores that ignore the condition still refuse what is there already
        return False
    try:
        fs.pipe_file(name, data, mode="create")
    except OSError as error:
        if not _exists_already(error):
            raise
        return False
    return True


def _exists_already(error: OSError) -> bool:
    """Whether a conditional put was refused because the object exists. s3fs tells it by the cause's code alone."""
    response = getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


def _sampled_hash(file: BinaryIO, size: int) -> str:
    digest = sha256(str(size).encode())
    last = max(size - _SAMPLE_BYTES, 0)
    for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
        file.seek(offset)
        digest.update(file.read(_SAMPLE_BYTES))
    return f"sampled-{digest.hexdigest()[:32]}"


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))
