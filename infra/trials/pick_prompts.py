"""Take the first K prompts of each task of a Spec-Bench file: pick_prompts.py SOURCE K TARGET"""

from __future__ import annotations

import sys
from collections import Counter

import pyarrow.parquet as pq


def main(source: str, per_task: int, target: str) -> None:
    table = pq.read_table(source)
    seen: Counter[str] = Counter()
    rows = []
    for row, task in enumerate(table["task"].to_pylist()):
        seen[task] += 1
        if seen[task] <= per_task:
            rows.append(row)
    pq.write_table(table.take(rows), target)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
