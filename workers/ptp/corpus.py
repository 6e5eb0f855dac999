"""Text that is on any machine: the sources of Python's own standard library, as rows for training and generation.

=================  ==================================================================================
file               rows
=================  ==================================================================================
`corpus.parquet`   id, text: passages for a language model to learn from, of all files but the held-out ones
`prompts.parquet`  id, prompt: the first lines of some of these passages
`bench.parquet`    id, prompt: the first lines of passages of held-out files, for measurements
=================  ==================================================================================

Rows are in an order by hash, so that neighbours are of different files: packed sequences of one file after another
teach badly. Which text that is depends on the version of Python; `corpus.parquet` says it in its metadata.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workers.ptp.documents import is_held_out

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MAX_BYTES = 300_000
"""Longer files are tables of numbers."""

_PASSAGE = 640
_PROMPT = 100
"""Characters of a row; about 2.5 a token with a vocabulary of a thousand."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file; `id` is its path below the library."""

    id: str
    text: str


def standard_library() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_sources(folder: Path) -> Iterator[SourceFile]:
    """Python files below a folder in order of their paths, without tests and installed packages."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix == ".py" and 0 < path.stat().st_size <= _MAX_BYTES:
                yield SourceFile(path.relative_to(folder).as_posix(), path.read_text("utf-8", "replace"))


def passages(file: SourceFile, characters: int) -> list[str]:
    """The file in passages of at least `characters`, cut at ends of lines; what is left at its end is left out.

    Worked example, 10 characters, five lines of 6 with their ends: lines 1-2, lines 3-4.
    """
    found: list[str] = []
    lines: list[str] = []
    length = 0
    for line in file.text.splitlines(keepends=True):
        lines.append(line)
        length += len(line)
        if length >= characters:
            found.append("".join(lines))
            lines, length = [], 0
    return found


def write_corpus(sources: Sequence[SourceFile], folder: Path, held_out: float, prompts: int, bench: int) -> None:
    """Write the three files; `prompts` and `bench` rows at most. `held_out` is a share of the files, by hash."""
    folder.mkdir(parents=True, exist_ok=True)
    learned = _rows([source for source in sources if not is_held_out(source.id, held_out)])
    kept = _rows([source for source in sources if is_held_out(source.id, held_out)])
    version = {"python": sys.version.split()[0]}
    _write(learned, "text", folder / "corpus.parquet", version)
    _write(_beginnings(learned[:prompts]), "prompt", folder / "prompts.parquet", version)
    _write(_beginnings(kept[:bench]), "prompt", folder / "bench.parquet", version)


def _rows(sources: Sequence[SourceFile]) -> list[SourceFile]:
    """Passages as files of their own, in an order by hash."""
    rows = [SourceFile(f"{s.id}#{i}", text) for s in sources for i, text in enumerate(passages(s, _PASSAGE))]
    return sorted(rows, key=lambda row: blake2b(row.id.encode(), digest_size=8, person=b"passage").digest())


def _beginnings(rows: Sequence[SourceFile]) -> list[SourceFile]:
    return [SourceFile(row.id, passages(row, _PROMPT)[0]) for row in rows]


def _write(rows: Sequence[SourceFile], column: str, path: Path, metadata: dict[str, str]) -> None:
    table = pa.table({"id": [row.id for row in rows], column: [row.text for row in rows]})
    pq.write_table(table.replace_schema_metadata(metadata), path)
