from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from pipeline import storage
from pipeline.conditional_put import exists_already
from pipeline.errors import ConfigError
from pipeline.storage import join
from tests.pipeline.makers import Careless


def test_objects_round_trip(root: str) -> None:
    storage.write_bytes(join(root, "a", "b"), b"one")
    storage.write_bytes(join(root, "a", "b"), b"two")
    storage.write_bytes(join(root, "a", "c"), b"")
    assert storage.read_bytes(join(root, "a", "b")) == b"two"
    assert storage.list_names(join(root, "a")) == ["b", "c"]
    assert storage.list_folder(root) == ([], ["a"])
    paths = [join(root, "a", "b"), join(root, "a", "c")]
    assert storage.read_many(paths) == {paths[0]: b"two", paths[1]: b""}
    assert storage.read_many([]) == {}
    storage.delete(paths[0])
    storage.delete(paths[0])
    assert not storage.exists(paths[0])
    assert storage.list_names(join(root, "none")) == []
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(paths[0])


def test_create_if_absent_keeps_the_first(root: str) -> None:
    path = join(root, "commits", "0")
    assert storage.create_if_absent(path, b"first")
    assert not storage.create_if_absent(path, b"second")
    assert storage.read_bytes(path) == b"first"
    assert storage.has_conditional_put(root)
    assert storage.list_names(root) == [], "the probe must leave nothing behind"


def test_one_of_many_racers_creates(root: str) -> None:
    path, start = join(root, "commits", "1"), threading.Barrier(8)

    def race(i: int) -> bool:
        start.wait()
        return storage.create_if_absent(path, str(i).encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert sum(won) == 1
    assert storage.read_bytes(path) == str(won.index(True)).encode()


def test_the_condition_of_the_put_itself_decides_on_s3(s3_bucket: str) -> None:
    """The existence check that comes first could hide a put that is not conditional."""
    fs, name = fsspec.core.url_to_fs(f"{s3_bucket}/conditional")
    fs.pipe_file(name, b"first")
    with pytest.raises(OSError) as raised:
        fs.pipe_file(name, b"second", mode="create")
    assert exists_already(raised.value)
    assert fs.cat_file(name) == b"first"


def test_a_store_without_conditional_put_is_found_out() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    assert not storage.has_conditional_put("careless://x")
    assert storage.create_if_absent("careless://x/a", b"first")
    assert not storage.create_if_absent("careless://x/a", b"second")
    assert storage.read_bytes("careless://x/a") == b"first"


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        storage.write_bytes(str(tmp_path / "taken"), b"data")
    assert os.listdir(tmp_path) == ["taken"]


def test_file_info_tells_contents_apart(root: str) -> None:
    large = bytes(range(256)) * 8192
    storage.write_bytes(join(root, "a"), large)
    storage.write_bytes(join(root, "b"), large)
    storage.write_bytes(join(root, "c"), large[:-1] + b"!")
    a, b, c = (storage.file_info(join(root, name)) for name in "abc")
    assert a.size == len(large)
    assert (a.size, a.etag) == (b.size, b.etag)
    assert a.etag != c.etag
    with pytest.raises(FileNotFoundError):
        storage.file_info(join(root, "none"))


def test_small_files_are_hashed_whole(tmp_path: Path) -> None:
    data = bytearray(os.urandom(2**20))
    path = tmp_path / "file"
    path.write_bytes(data)
    before = storage.file_info(str(path)).etag
    for position in range(0, len(data), 32_771):
        data[position] ^= 1
        path.write_bytes(data)
        assert storage.file_info(str(path)).etag != before, position
        data[position] ^= 1


def test_find_lists_files_globs_and_folders(root: str) -> None:
    for name in ("in/b.parquet", "in/a.parquet", "in/deep/c.parquet", "in/_d.parquet", "in/.e", "in/_f/g.parquet"):
        storage.write_bytes(join(root, name), b"x")
    found = [join(root, "in", name) for name in ("a.parquet", "b.parquet", "deep/c.parquet")]
    assert paths_of(join(root, "in")) == _as_found(found)
    assert paths_of(join(root, "in", "*.parquet")) == _as_found([join(root, "in/_d.parquet"), *found[:2]])
    assert paths_of(found[0]) == _as_found([found[0]])
    assert paths_of(join(root, "none")) == []
    assert paths_of(join(root, "none*")) == []


def paths_of(path: str) -> list[str]:
    """What `find` finds; what its listing tells of a file must be what asking for the file tells."""
    files = storage.find(path)
    for file in files:
        info = storage.file_info(file.path)
        assert (file.size, file.etag or info.etag) == (info.size, info.etag)
    return [file.path for file in files]


def _as_found(paths: list[str]) -> list[str]:
    """memory:// paths come back with the root slash that its file system puts before them."""
    return sorted(path.replace("memory://", "memory:///") for path in paths)


def test_open_input_reads_and_seeks(root: str) -> None:
    storage.write_bytes(join(root, "lines"), b"one\ntwo\nthree")
    with storage.open_input(join(root, "lines")) as file:
        file.seek(4)
        assert file.readline() == b"two\n"
        assert file.tell() == 8
        assert file.read() == b"three"


def test_outputs_that_cannot_be_written(tmp_path: Path, s3_bucket: str) -> None:
    storage.check_writable(str(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file" / "out")
    with pytest.raises(ConfigError) as raised:
        storage.check_writable(folder)
    assert str(raised.value) == f"output.path must be writable, got {folder!r}: Not a directory"
    with pytest.raises(ConfigError) as raised:
        storage.check_writable("s3://no-such-bucket/out")
    reason = "The specified bucket does not exist"
    assert str(raised.value) == f"output.path must be writable, got 's3://no-such-bucket/out': {reason}"
    with pytest.raises(ConfigError, match=r"^output.path must be writable, got 'nostore://x': .*Protocol not known"):
        storage.check_writable("nostore://x")


def test_paths() -> None:
    assert join("s3://bucket/out/", "data", "x") == "s3://bucket/out/data/x"
    assert join("/", "x") == "/x"
    assert storage.absolute("a/b") == os.path.join(os.getcwd(), "a/b")
    assert storage.absolute("s3://a/b") == "s3://a/b"
