"""Which files a job reads: paths, globs, folders, finished outputs and datasets, resolved to a fixed list.

Order is the order of `input.path`, sorted by name within a glob or folder. A folder counts its `.parquet`, `.jsonl`
and `.ndjson` files at every depth, save for names that begin with `_` or `.`. A folder that one of our own jobs has
finished counts the parts that its manifest names. A folder that `datasets` saved to disk is told by its own marker
files; a `datasets` name is one only under `input.format: datasets`, so that a mistyped path never goes to the network.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline import storage
from pipeline.config import InputConfig
from pipeline.errors import ConfigError
from pipeline.records import InputFormat

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT_OF_SUFFIX: dict[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. `label`, `size` and `etag` enter the job's identity, `path` does not: a dataset may move."""

    path: str
    label: str
    format: InputFormat
    size: int
    etag: str


def find_inputs(config: InputConfig) -> tuple[InputFile, ...]:
    """All input files in order, each once. Raises ConfigError for a path that names none."""
    found = dict(entry for path in config.path for entry in _entries(path, config))
    labels = _labels(list(found))
    return tuple(_described(path, labels[path], kind, config) for path, kind in found.items())


def open_dataset(path: str, config: InputConfig) -> Dataset:
    """A dataset of the `datasets` library, memory-mapped. Raises ConfigError where it cannot be loaded."""
    return _cached_dataset(path, config.subset, config.split)


def _entries(given: str, config: InputConfig) -> Iterator[tuple[str, InputFormat]]:
    """(path, format) of the files that one entry of `input.path` names."""
    path = storage.absolute(given)
    if config.format == "datasets":
        yield (path if storage.exists(path) else given), "datasets"
        return
    if config.format == "auto" and _is_saved_dataset(path):
        yield path, "datasets"
        return
    if storage.exists(storage.join(path, "_job.json")):
        files = _finished_parts(given, path)
    else:
        files = storage.find(path)
        if storage.is_folder(path) and config.format == "auto":
            files = [file for file in files if _suffix(file) in _FORMAT_OF_SUFFIX]
    if not files:
        raise ConfigError(
            f"input.path must name existing .parquet or .jsonl files, got {given!r} "
            "(for a datasets name set input.format to datasets)"
        )
    for file in files:
        yield file, _format_of(file, config)


def _finished_parts(given: str, path: str) -> list[str]:
    if not storage.exists(storage.join(path, "_SUCCESS")):
        raise ConfigError(f"input.path must not be the output of an unfinished job, got {given!r}")
    manifest = json.loads(storage.read_bytes(storage.join(path, "_manifest.json")))
    return [storage.join(path, part["path"]) for part in manifest["parts"]]


def _format_of(file: str, config: InputConfig) -> InputFormat:
    if config.format != "auto":
        return config.format
    if _suffix(file) not in _FORMAT_OF_SUFFIX:
        raise ConfigError(
            f"input.path must name .parquet, .jsonl or .ndjson files unless input.format tells the format, got {file!r}"
        )
    known = _FORMAT_OF_SUFFIX[_suffix(file)]
    return "openai_batch" if known == "jsonl" and _is_openai_batch(file) else known


def _suffix(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _is_openai_batch(file: str) -> bool:
    with storage.open_input(file) as lines:
        try:
            first = json.loads(lines.readline())
        except ValueError:
            return False
    return isinstance(first, dict) and "custom_id" in first and "body" in first


def _is_saved_dataset(path: str) -> bool:
    return storage.exists(storage.join(path, "dataset_dict.json")) or (
        storage.exists(storage.join(path, "state.json")) and storage.exists(storage.join(path, "dataset_info.json"))
    )


def _labels(paths: list[str]) -> dict[str, str]:
    """Each path below the common parent of all.

    Worked example: `/d/x/a.pq, /d/y/b.pq` are `x/a.pq, y/b.pq`; `/d/a.pq` alone is `a.pq`.
    """
    parents = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    common = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, parents)))
    return {path: "/".join(path.split("/")[common:]) for path in paths}


def _described(path: str, label: str, kind: InputFormat, config: InputConfig) -> InputFile:
    if kind == "datasets":
        dataset = open_dataset(path, config)
        return InputFile(path, label, kind, int(dataset.data.nbytes), str(dataset._fingerprint))
    info = storage.file_info(path)
    return InputFile(path, label, kind, info.size, info.etag)


@functools.lru_cache(maxsize=4)
def _cached_dataset(path: str, subset: str | None, split: str) -> Dataset:
    import datasets  # here, since it takes seconds to import and few jobs need it

    try:
        if not _is_saved_dataset(path):
            return datasets.load_dataset(path, subset, split=split)
        saved = datasets.load_from_disk(path)
    except Exception as error:  # the library raises of many kinds, its own and those of every builder
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"input.path must be a datasets name or saved-to-disk folder that can be loaded, got {path!r}: {reason}"
        ) from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise ConfigError(f"input.split must be one of {', '.join(saved)}, got {split!r}")
    return saved[split]
