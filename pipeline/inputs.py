"""Which files a job reads: paths, globs, folders, finished outputs and datasets, resolved to a fixed list.

Order is the order of `input.path`, sorted by name within a glob or folder. A folder counts its `.parquet`, `.jsonl`,
`.ndjson`, `.csv` and `.tsv` files at every depth, save for names that begin with `_` or `.`. A folder that one of our
own jobs has finished counts the parts that its manifest names. A folder that `datasets` saved to disk is told by its
own marker files; a `datasets` name is one only under `input.format: datasets`, so that a mistyped path never goes to
the network.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline import storage
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError
from pipeline.parallel import in_order
from pipeline.part_names import checked_part_name
from pipeline.records import InputFormat
from pipeline.redaction import MASK, without_credentials
from pipeline.storage import FoundFile

if TYPE_CHECKING:
    from datasets import Dataset

_FORMAT_OF_SUFFIX: dict[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}
_FIRST_LINE_BYTES = 64 * 1024


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
    found: dict[str, _Entry] = {}
    for path in config.path:
        for entry in _entries(path, config):
            found.setdefault(entry.path, entry)
    labels = _labels(list(found))
    return tuple(in_order(lambda entry: _described(entry, labels[entry.path], config), found.values()))


def open_dataset(path: str, config: InputConfig) -> Dataset:
    """A dataset of the `datasets` library, memory-mapped. Raises ConfigError where it cannot be loaded."""
    return _cached_dataset(path, config.subset, config.split)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file that an entry of `input.path` names, and what the listing that found it tells of it, if one did.

    A format of None is told by the file's first line.
    """

    path: str
    format: InputFormat | None
    listed: FoundFile | None = None


def _entries(given: str, config: InputConfig) -> Iterator[_Entry]:
    """The files that one entry of `input.path` names."""
    path = storage.absolute(given)
    if config.format == "datasets":
        yield _Entry(path if storage.exists(path) else given, "datasets")
        return
    has_query = _name(path) != without_credentials(path)  # then it is a file: nothing can be joined to it
    if config.format == "auto" and not has_query and _is_saved_dataset(path):
        yield _Entry(path, "datasets")
        return
    if not has_query and storage.exists(storage.join(path, "_job.json")):
        files = _finished_parts(given, path)
    else:
        files = storage.find(path)
        if storage.is_folder(path) and config.format == "auto":
            files = [file for file in files if _suffix(file.path) in _FORMAT_OF_SUFFIX]
    if not files:
        raise ConfigError(
            f"input.path must name existing .parquet, .jsonl or .csv files, got {given!r} "
            "(for a datasets name set input.format to datasets)"
        )
    for file in files:
        yield _Entry(file.path, _format_of(file.path, config), file)


def _finished_parts(given: str, path: str) -> list[FoundFile]:
    if not storage.exists(storage.join(path, "_SUCCESS")):
        raise ConfigError(f"input.path must not be the output of an unfinished job, got {given!r}")
    manifest = json.loads(storage.read_bytes(storage.join(path, "_manifest.json")))
    listed = {file.path.rsplit("/", 1)[-1]: file for file in storage.find(storage.join(path, "data"))}
    parts = []
    for part in manifest["parts"]:
        name = checked_part_name(part["path"]).rsplit("/", 1)[-1]
        if name not in listed:
            raise ConfigError(f"input.path must hold the parts that its manifest names, got {given!r} without {name}")
        parts.append(replace(listed[name], path=storage.join(path, part["path"])))
    return parts


def _format_of(file: str, config: InputConfig) -> InputFormat | None:
    """The format as settings and name tell it; None for lines of JSON, of which there are two kinds."""
    if config.format != "auto":
        return config.format
    if _suffix(file) not in _FORMAT_OF_SUFFIX:
        raise ConfigError(
            f"input.path must name {', '.join(_FORMAT_OF_SUFFIX)} files unless input.format tells the format, got "
            f"{file!r}"
        )
    known = _FORMAT_OF_SUFFIX[_suffix(file)]
    return None if known == "jsonl" else known


def _suffix(file: str) -> str:
    return os.path.splitext(_name(file))[1].lower()


def _name(path: str) -> str:
    """A path as it may be stored and shown: without credentials, and an http address without its query."""
    return without_credentials(path).removesuffix(f"?{MASK}")


def _kind_of_lines(file: str, size: int) -> InputFormat:
    """Whether lines of JSON are those of an OpenAI batch file, by the first of them."""
    line = storage.read_range(file, 0, min(size, _FIRST_LINE_BYTES))
    if b"\n" not in line and size > len(line):
        with storage.open_input(file) as lines:
            line = lines.readline()
    try:
        first = json.loads(line.split(b"\n", 1)[0])
    except ValueError:
        return "jsonl"
    return "openai_batch" if isinstance(first, dict) and "custom_id" in first and "body" in first else "jsonl"


def _is_saved_dataset(path: str) -> bool:
    return storage.exists(storage.join(path, "dataset_dict.json")) or (
        storage.exists(storage.join(path, "state.json")) and storage.exists(storage.join(path, "dataset_info.json"))
    )


def _labels(paths: list[str]) -> dict[str, str]:
    """Each path below the common parent of all.

    Labels are stored and become row ids, so credentials and queries of addresses are left out.

    Worked example: `/d/x/a.pq, /d/y/b.pq` are `x/a.pq, y/b.pq`; `/d/a.pq` alone is `a.pq`.
    """
    names_of = {path: _name(path).split("/") for path in paths}
    parents = zip(*(names[:-1] for names in names_of.values()), strict=False)
    common = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, parents)))
    labels = {path: "/".join(names[common:]) for path, names in names_of.items()}
    if len(set(labels.values())) < len(labels):
        raise ConfigError("input.path must not name addresses that differ in their query or credentials alone")
    return labels


def _described(entry: _Entry, label: str, config: InputConfig) -> InputFile:
    if entry.format == "datasets":
        dataset = open_dataset(entry.path, config)
        return InputFile(entry.path, label, entry.format, int(dataset.data.nbytes), str(dataset._fingerprint))
    listed = entry.listed
    assert listed is not None, entry
    etag = storage.content_marker(listed.path, listed.size) if listed.etag is None else listed.etag
    kind = entry.format or _kind_of_lines(listed.path, listed.size)
    return InputFile(entry.path, label, kind, listed.size, etag)


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
