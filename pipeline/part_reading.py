"""Parts read whole, as tables."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage


def read_part(path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Some columns of a part, or all of them."""
    with storage.open_input(path) as source:
        # No threads: one that still holds the Python file when Python ends aborts the process.
        return pq.ParquetFile(source).read(None if columns is None else list(columns), use_threads=False)
