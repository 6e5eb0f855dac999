"""Objects by path: local disk, `memory://`, S3 and whatever else fsspec reaches. Paths are strings, never pathlib.

Objects are written whole or not at all. What makes commits safe is `create_if_absent`:

* local disk: the bytes are written under a hidden name, then linked to the final one (atomic, fails when it exists);
* `memory://`: under a lock of this process;
* object stores: a conditional put (`If-None-Match: *` on S3, the generation check on GCS). `has_conditional_put` probes
  a store for it; without it two drivers that commit the same shard within the same instant could both believe they won.

Options come from the environment, as fsspec and the stores' own clients read them: `AWS_ENDPOINT_URL` (or
`FSSPEC_S3_ENDPOINT_URL`), `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_PROFILE`, `FSSPEC_S3='{"anon": true}'`.

Faults of a store are borne for a while, then raised; `faults` says which and as what, `clients` what limits there are.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pipeline import local_disk
from pipeline.clients import resolve, time_limit
from pipeline.conditional_put import put_if_absent, refuses_second_put
from pipeline.errors import ConfigError, SevenLeagueError, TransientError
from pipeline.faults import patience, persistently
from pipeline.reopening_file import ReopeningFile
from pipeline.sampled_hash import sampled_hash

T = TypeVar("T")

_MEMORY_LOCK = threading.Lock()
_CONDITIONAL: set[str] = set()
"""Stores that have shown this process that a conditional put of theirs is one; others are asked before each."""
_BUFFER_BYTES = 256 * 1024
_READ_TOGETHER = 1000
_FIRST_CONTACT_S = 10.0
"""Patience with a store that may never have worked: its user waits for a sentence about it."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """An object and what tells its content apart: the store's etag, or `sampled-..` where the store keeps none."""

    path: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as a listing tells of it; not every store lists an etag."""

    path: str
    size: int
    etag: str | None


def join(root: str, *names: str) -> str:
    """`join("s3://bucket/out/", "data", "x")` is `s3://bucket/out/data/x`."""
    return "/".join([root.rstrip("/") or root, *names]) if root != "/" else "/" + "/".join(names)


def absolute(path: str) -> str:
    """A local path made absolute; URLs stay as they are. Workers may run in another folder than the driver."""
    if "://" in path:
        return path
    return os.path.abspath(os.path.expanduser(path))


def read_bytes(path: str) -> bytes:
    return _with_store(path, lambda fs, name: cast(bytes, fs.cat_file(name, **time_limit(fs))))


def read_range(path: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object, which must have them."""

    def read(fs: Any, name: str) -> bytes:
        data: bytes = fs.cat_file(name, start=start, end=stop, **time_limit(fs)) if stop > start else b""
        if len(data) != stop - start:
            raise TransientError(f"storage fault at {path}: {len(data)} bytes came of {stop - start}")
        return data

    return _with_store(path, read)


def read_many(paths: Sequence[str]) -> dict[str, bytes]:
    """The bytes of several objects of one store, fetched concurrently where the store can."""
    found: dict[str, bytes] = {}
    missing = list(dict.fromkeys(paths))

    def read_some(fs: Any, _: str) -> None:
        batch = {fs._strip_protocol(path): path for path in missing[:_READ_TOGETHER]}
        answers = fs.cat(list(batch), on_error="return", **time_limit(fs))
        found.update((path, answers[name]) for name, path in batch.items() if isinstance(answers[name], bytes))
        missing[:_READ_TOGETHER] = [path for path in batch.values() if path not in found]
        for answer in answers.values():
            if not isinstance(answer, bytes):
                raise answer

    while missing:
        _with_store(missing[0], read_some)
    return found


def write_bytes(path: str, data: bytes) -> None:
    """Write an object whole, replacing what was there. A reader never sees a part of it, whatever fails."""

    def write(fs: Any, name: str) -> None:
        if isinstance(fs, LocalFileSystem):
            local_disk.write(name, data)
        else:
            fs.pipe_file(name, data, **time_limit(fs))

    _with_store(path, write)


def create_if_absent(path: str, data: bytes) -> bool:
    """Create an object whole; False, and nothing changed, when one of that name exists.

    It may be one's own: when the answer to a put is lost, the put is repeated.
    """

    def create(fs: Any, name: str) -> bool:
        if isinstance(fs, LocalFileSystem):
            return local_disk.create(name, data)
        with _MEMORY_LOCK if isinstance(fs, MemoryFileSystem) else contextlib.nullcontext():
            # A store that may ignore the condition still refuses what is there already.
            if _store_of(path) not in _CONDITIONAL and fs.exists(name, **time_limit(fs)):
                return False
            return put_if_absent(fs, name, data)

    return _with_store(path, create)


def has_conditional_put(folder: str) -> bool:
    """Whether `create_if_absent` is atomic in this store, found out by trying: a second conditional put must fail.

    The existence check that `create_if_absent` makes first is left out here, so that only the store can refuse.
    """

    def probe(fs: Any, name: str) -> bool:
        return isinstance(fs, LocalFileSystem) or refuses_second_put(fs, name)

    found = _with_store(join(folder, f"_probe-{uuid.uuid4().hex}"), probe)
    if found:
        _CONDITIONAL.add(_store_of(folder))
    return found


def exists(path: str) -> bool:
    return _with_store(path, lambda fs, name: bool(fs.exists(name, **time_limit(fs))))


def is_folder(path: str) -> bool:
    return _with_store(path, lambda fs, name: bool(fs.isdir(name, **time_limit(fs))))


def list_names(folder: str) -> list[str]:
    """Sorted names of the objects right in a folder, hidden ones left out; none when there is no such folder."""
    return list_folder(folder)[0]


def list_sizes(folder: str) -> dict[str, int]:
    """Sizes in bytes of the objects that `list_names` gives, by name, from the same one listing."""
    return {name: int(entry["size"]) for name, entry in _entries(folder) if entry["type"] == "file"}


def list_folder(folder: str) -> tuple[list[str], list[str]]:
    """Sorted names of the objects and of the folders right in a folder, by one listing (see `list_names`)."""
    names: dict[str, list[str]] = {"file": [], "directory": []}
    for name, entry in _entries(folder):
        names.setdefault(entry["type"], []).append(name)
    return names["file"], names["directory"]


def find(path: str) -> list[FoundFile]:
    """The files that a path names, sorted: itself, the matches of a glob, or all files below a folder.

    Below a folder, names that begin with `_` or `.` are left out, at every level. One listing finds them all.
    """

    def search(fs: Any, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
        if fs.isfile(name):
            return [(name, fs.info(name))]
        if any(wildcard in name for wildcard in "*?["):
            matches: dict[str, Any] = fs.glob(name, detail=True)
            return matches.items()
        below: dict[str, Any] = fs.find(name, detail=True) if fs.isdir(name) else {}
        inner = len(name.rstrip("/")) + 1
        return [(file, entry) for file, entry in below.items() if not _is_hidden(file[inner:])]

    def named(fs: Any, name: str) -> list[FoundFile]:
        return [
            FoundFile(_full_path(fs, path, file), int(entry["size"]), _etag(entry))
            for file, entry in search(fs, name)
            if entry["type"] == "file"
        ]

    return sorted(_with_store(path, named), key=lambda file: file.path)


def delete(path: str) -> None:
    """Remove an object; nothing happens when there is none."""

    def remove(fs: Any, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(name)

    _with_store(path, remove)


def remove_leftovers(folder: str) -> None:
    """Remove what killed processes have left half-written in a folder; object stores keep no such thing in sight."""
    _with_store(folder, lambda fs, name: local_disk.remove_leftovers(name) if isinstance(fs, LocalFileSystem) else None)


def file_info(path: str) -> FileInfo:
    """Size and content marker (see `content_marker`) of an object. Raises FileNotFoundError."""
    entry = _with_store(path, lambda fs, name: fs.info(name, **time_limit(fs)))
    size, etag = int(entry["size"]), _etag(entry)
    return FileInfo(path, size, content_marker(path, size) if etag is None else etag)


def content_marker(path: str, size: int) -> str:
    """What tells the content of an object apart where the store keeps no etag (local disk, `memory://`)."""

    def read(fs: Any, name: str) -> str:
        with fs.open(name, "rb") as file:
            return sampled_hash(file, size)

    return _with_store(path, read)


def open_input(path: str) -> io.BufferedReader:
    """A seekable file to read from. Its faults are borne and raised as those of all operations here."""
    return io.BufferedReader(ReopeningFile(path), _BUFFER_BYTES)


def check_writable(folder: str) -> None:
    """Raise ConfigError unless objects can be created, read and removed in a folder."""
    probe = join(folder, f"_probe-{uuid.uuid4().hex}")
    try:
        with patience(_FIRST_CONTACT_S):
            write_bytes(probe, b"probe")
            read_bytes(probe)
            delete(probe)
    except Exception as raised:  # whatever the store says, it says that the output cannot be written
        error = raised.__cause__ if isinstance(raised, SevenLeagueError) and raised.__cause__ else raised
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise ConfigError(f"output.path must be writable, got {folder!r}: {reason}") from raised


def _store_of(path: str) -> str:
    """`s3://bucket/a/b` is of `s3://bucket`."""
    return "/".join(path.split("/")[:3])


def _with_store(path: str, action: Callable[[Any, str], T]) -> T:
    """The result of an action on the file system of a path and its name there, repeated while faults may pass."""
    fs, name = resolve(path)
    return persistently(path, lambda: action(fs, name))


def _entries(folder: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, what the store tells) of everything right in a folder but what is hidden, by name."""

    def listed(fs: Any, name: str) -> list[dict[str, Any]]:
        try:
            return cast(list[dict[str, Any]], fs.ls(name, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    entries = ((entry["name"].rstrip("/").rsplit("/", 1)[-1], entry) for entry in _with_store(folder, listed))
    return sorted(((name, entry) for name, entry in entries if name and name[0] != "."), key=lambda pair: pair[0])


def _etag(entry: dict[str, Any]) -> str | None:
    etag = entry.get("ETag") or entry.get("etag")
    return None if etag is None else str(etag).strip('"')


def _full_path(fs: Any, asked: str, name: str) -> str:
    return cast(str, fs.unstrip_protocol(name)) if "://" in asked else name


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))
