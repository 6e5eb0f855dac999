"""CSV and TSV files: rows with their places in the file, so that a shard is a range of bytes.

The first record is the header. Fields are as RFC 4180 has them: a quoted field may hold delimiters, doubled quotes and
line ends. Planning and reading use the same parser, Python's, so they agree where a row ends, on stray quotes too. All
values are text, and an empty field is null. Blank lines are no rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline import storage
from pipeline.errors import ConfigError, RowError
from pipeline.records import InputFormat

_DELIMITERS: dict[InputFormat, str] = {"csv": ",", "tsv": "\t"}
_LONGEST_FIELD = 2**24
"""Characters. An unclosed quote makes the rest of a file one field: it ends there."""
_HEADER_BYTES = 2**20


class _Lines(Protocol):
    def readline(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class CsvRow:
    """A record of a file: its fields, or why it has none, and where the next record begins."""

    fields: list[str]
    stop: int
    error: RowError | None = None


def read_header(path: str, kind: InputFormat, stop: int) -> tuple[list[str], int]:
    """The names of the columns, and where the rows begin, of a file that has `stop` bytes at least.

    Raises ConfigError for a header that cannot be used.
    """
    head = storage.read_range(path, 0, min(stop, _HEADER_BYTES))
    first = next(records(io.BytesIO(head), kind, 0), None)
    if first is None:
        return [], stop
    if first.error is not None or first.stop == _HEADER_BYTES:
        why = first.error or f"its first {_HEADER_BYTES:,} bytes are one line"
        raise ConfigError(f"input.path must name CSV files with a header, got {path!r}: {why}")
    names = [first.fields[0].removeprefix("\ufeff"), *first.fields[1:]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"input.path must name CSV files whose columns differ, got {twice!r} twice in {path!r}")
    return names, first.stop


def records(lines: _Lines, kind: InputFormat, start: int) -> Iterator[CsvRow]:
    """The records from the byte `start`, at which `lines` stands, to the end of the file."""
    csv.field_size_limit(_LONGEST_FIELD)
    source = _Decoded(lines, start)
    parser = csv.reader(source, delimiter=_DELIMITERS[kind])
    while True:
        source.is_text = True
        try:
            fields = next(parser)
        except StopIteration:
            return
        except csv.Error as error:
            # The parser has dropped what it had of the record and goes on with the next line.
            yield CsvRow([], source.offset, RowError("invalid_csv", f"the line is not CSV: {error}"))
            continue
        if not source.is_text:
            yield CsvRow([], source.offset, RowError("invalid_csv", "the line is not UTF-8"))
        elif fields:
            yield CsvRow(fields, source.offset)


def values_of(row: CsvRow, names: Sequence[str]) -> dict[str, str | None]:
    """A record by column; raises RowError where it has none."""
    if row.error is not None:
        raise row.error
    if len(row.fields) != len(names):
        raise RowError("invalid_csv", f"the row has {len(row.fields)} fields, and the header has {len(names)}")
    return {name: value or None for name, value in zip(names, row.fields, strict=True)}


class _Decoded:
    """Lines as text, and how far they reach. `is_text` turns false with a line that is no UTF-8."""

    def __init__(self, lines: _Lines, offset: int) -> None:
        self._lines = lines
        self.offset = offset
        self.is_text = True

    def __iter__(self) -> _Decoded:
        return self

    def __next__(self) -> str:
        line = self._lines.readline()
        if not line:
            raise StopIteration
        self.offset += len(line)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.is_text = False
            return line.decode(errors="replace")
