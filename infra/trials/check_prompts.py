"""Check that an output holds every prompt of its input exactly once: check_prompts.py INPUT OUTPUT"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def main(source: str, output: Path) -> None:
    wanted = {row["id"]: row["messages"] for row in pq.read_table(source).to_pylist()}
    manifest = json.loads((output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]
    ids = [str(row["id"]) for row in rows]
    assert len(set(ids)) == len(ids), "an id is there twice"
    assert set(ids) == {str(uid) for uid in wanted}, "a prompt is missing"
    for row in rows:
        assert row["messages"] == wanted[type(next(iter(wanted)))(row["id"])], row["id"]
    print(f"{output}: {len(rows)} rows, ids unique, every prompt of {source} present")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
