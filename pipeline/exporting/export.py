"""An export from beginning to end: the committed parts, in order, through filters and format into files of splits.

Rows stream: what is held at a time are the rows of a few megabytes, the files in the making, and 16 bytes for each row
where duplicates are looked for. The card is written last; a data set without one is not whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.exporting.card import card
from pipeline.exporting.context import Context
from pipeline.exporting.files import SplitFiles
from pipeline.exporting.formats import Format, format_of
from pipeline.exporting.options import ExportOptions, described
from pipeline.exporting.selection import Selection
from pipeline.exporting.splits import split_of
from pipeline.redaction import without_credentials

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 1024
_TOPK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Exported:
    """What an export gave. `left_out`: how many samples broke which rule; `lengths` counts samples by new tokens."""

    files: tuple[SplitFiles, ...]
    left_out: tuple[tuple[str, int], ...]
    samples: int = 0
    prompt_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    @property
    def completion_tokens(self) -> int:
        return sum(length * count for length, count in self.lengths.items())


def export(output: str, dest: str, options: ExportOptions) -> Exported:
    """Write the samples of a job's output as a data set. Raises ConfigError for what cannot be."""
    store = JobStore(output)
    config = store.load_config()
    state = store.state()
    if state != "done" and not options.allow_unfinished:
        raise ConfigError(
            f"OUTPUT must be of a finished job, got {output!r} which is {state}; --allow-unfinished exports what is "
            "committed"
        )
    found = format_of(options, config)
    selection = Selection(options.filters, options.sequence_length, found.ends)
    selection.check(config)
    if any(storage.list_folder(dest)) or (storage.exists(dest) and not storage.is_folder(dest)):
        raise ConfigError(f"DEST must be empty or not there, got {dest!r}")
    paths = [storage.join(output, receipt.path) for receipt in store.committed().values()]
    writing = _Writing(store, config, found, selection, dest, options)
    for path in paths:
        for table in _batches(path, config, _columns(found, selection)):
            writing.add(selection.kept(table))
    exported = writing.close()
    revision = store.model_revision()
    storage.write_bytes(storage.join(dest, "README.md"), card(config, revision, options, state, exported).encode())
    return exported


class _Writing:
    """The files of an export in the making, and the counts of what went into them."""

    def __init__(
        self, store: JobStore, config: JobConfig, found: Format, selection: Selection, dest: str, options: ExportOptions
    ) -> None:
        self._format = found
        self._options = options
        self._config = config
        self._created = int(store.created())
        file_format = options.file_format or found.natural
        self._files = {name: SplitFiles(dest, name, file_format, options.file_mb) for name, _ in options.splits}
        self._context: Context | None = None
        self._selection = selection
        self._samples = self._prompt_tokens = 0
        self._lengths: Counter[int] = Counter()

    def add(self, table: pa.Table) -> None:
        if table.num_rows == 0:
            return
        if self._context is None:
            self._context = self._new_context(table)
        self._count(table)
        splits = np.array([split_of(uid, self._options.splits) for uid in table["id"].to_pylist()])
        columns = table.column_names if self._format.columns is None else self._format.columns
        for name, files in self._files.items():
            for piece in self._pieces(table.filter(pa.array(splits == name))):
                files.add(self._format.convert(piece.select(columns), self._context))

    def close(self) -> Exported:
        for files in self._files.values():
            files.close()
        rules = described(self._options, self._format.ends)
        left_out = tuple((rule, self._selection.dropped[name]) for name, rule in rules)
        return Exported(tuple(self._files.values()), left_out, self._samples, self._prompt_tokens, self._lengths)

    def _new_context(self, table: pa.Table) -> Context:
        conversational = "messages" in table.column_names and table["messages"][0].is_valid
        model = without_credentials(self._config.model.id)
        options = self._options
        return Context(model, self._created, conversational, options.trailing_tokens, options.sequence_length)

    def _count(self, table: pa.Table) -> None:
        self._samples += table.num_rows
        self._prompt_tokens += int(np.sum(table["prompt_tokens"].to_numpy()))
        self._lengths.update(table["completion_tokens"].to_pylist())

    def _pieces(self, table: pa.Table) -> Iterator[pa.Table]:
        """Padding and the top k of prompts can make much more of a row than was read."""
        if "topk" not in self._format.extras or table.num_rows == 0:
            yield table
            return
        longest = int(np.max(table["prompt_tokens"].to_numpy() + table["completion_tokens"].to_numpy()))
        width = (self._options.sequence_length or longest) * self._config.sampling.logprobs * 8
        rows = max(1, _TOPK_BYTES // width)
        for start in range(0, table.num_rows, rows):
            yield table.slice(start, rows)


def _columns(found: Format, selection: Selection) -> list[str] | None:
    return None if found.columns is None else list(dict.fromkeys([*found.columns, *selection.columns]))


def _batches(path: str, config: JobConfig, columns: list[str] | None) -> Iterator[pa.Table]:
    """The rows of a part in tables of some megabytes, each with all samples of its prompts."""
    n = config.sampling.n
    with storage.open_input(path) as source, closing(pq.ParquetFile(source)) as file:
        num_bytes = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
        affordable = _BATCH_BYTES * file.metadata.num_rows // max(num_bytes, 1)
        rows = max(n, min(_BATCH_ROWS, affordable) // n * n)
        left: list[pa.RecordBatch] = []
        # No threads: one that still holds the Python file when Python ends aborts the process.
        for batch in file.iter_batches(rows, columns=columns, use_threads=False):
            table = pa.Table.from_batches([*left, batch])
            whole = table.num_rows // n * n
            left = table.slice(whole).to_batches()
            yield table.slice(0, whole)
        assert not left, f"{path} does not hold {n} samples of each prompt"
