"""Whether two outputs hold the same tokens, and what their steps gave: same_outputs.py BEFORE AFTER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

COLUMNS = ["id", "sample_index", "completion_token_ids", "num_steps", "completion_tokens"]


def main(before: Path, after: Path) -> None:
    both = [{(row["id"], row["sample_index"]): row for row in rows(output)} for output in (before, after)]
    for output, samples in zip((before, after), both, strict=True):
        tokens, steps = (sum(row[name] for row in samples.values()) for name in ("completion_tokens", "num_steps"))
        print(f"{output}: {len(samples)} samples, {tokens} tokens, {tokens / steps:.3f} tokens per step")
    same = [both[0][key]["completion_token_ids"] == row["completion_token_ids"] for key, row in both[1].items()]
    print(f"{sum(same)} of {len(both[0])} samples identical")
    sys.exit(0 if all(same) and both[0].keys() == both[1].keys() else 1)


def rows(output: Path) -> list[dict[str, Any]]:
    manifest = json.loads((output / "_manifest.json").read_text())
    return [
        row for part in manifest["parts"] for row in pq.read_table(output / part["path"], columns=COLUMNS).to_pylist()
    ]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
